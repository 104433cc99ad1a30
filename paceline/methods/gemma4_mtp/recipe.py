"""How a Gemma 4 assistant is trained: its options, and its objective at a start that is fitted on the text."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.methods.gemma4_mtp.objective import Gemma4MtpObjective, TargetTables
from paceline.methods.gemma4_mtp.start import default_shape, starting_parameters
from paceline.methods.gemma4_mtp.token_clusters import check_clusters
from paceline.target import TapSpec
from paceline.training.configuration import parse_configuration, read_config_json, text_part
from paceline.training.inputs import FIT_TOKENS, TrainingInputs
from paceline.training.options import option
from paceline.training.recipe import Recipe
from paceline.training.target_rows import TargetRows
from paceline.training.target_weights import read_embedding_and_head


@dataclass(frozen=True, slots=True)
class Gemma4MtpOptions:
    """Options of a Gemma 4 assistant.

    Attributes:
        num_layers: layers of the drafter.
        draft_hidden: width of the drafter, which is narrower than its target.
        draft_intermediate: width of its gated MLP.
        num_clusters: clusters of its exported output head, which scores only the tokens of the best clusters; 0 scores
            all tokens.
        num_selected: clusters that such a head scores.
        test_steps: depths that are trained.
        step_decay: weight of one depth's loss over that of the depth before.
        depth_loss: ce on the text's tokens, or kl to the target's distributions.
        token_rows: rows of a batch whose loss is computed, chosen at random; 0 for all.
    """

    num_layers: int = option(4, minimum=1)
    draft_hidden: int = option(256, minimum=1)
    draft_intermediate: int = option(1024, minimum=1)
    num_clusters: int = option(0, minimum=0)
    num_selected: int = option(32, minimum=1)
    test_steps: int = option(4, minimum=1)
    step_decay: float = option(0.8, above=0)
    depth_loss: str = option("ce", choices=("ce", "kl"))
    token_rows: int = option(0, minimum=0)


def _build(options: Gemma4MtpOptions, inputs: TrainingInputs) -> Gemma4MtpObjective:
    text = text_part(parse_configuration(read_config_json(inputs.model_dir)))
    shape, cached = default_shape(text, options.num_layers, options.draft_hidden, options.draft_intermediate)
    check_clusters(shape.vocab, options.num_clusters, options.num_selected)
    embedding, head = read_embedding_and_head(inputs.model_dir)
    is_gemma = str(text.model_type).startswith("gemma")
    tables = TargetTables(
        embedding,
        shape.backbone**0.5 if is_gemma else 1.0,
        head,
        TargetRows(inputs.model_dir, TapSpec(norm_final=True, cached=tuple(cached.values())), inputs.dtype),
    )
    start, scale = starting_parameters(shape, tables, inputs.corpus, FIT_TOKENS, inputs.seed)
    return Gemma4MtpObjective(
        shape,
        cached,
        start,
        tables,
        inputs.reference(int(text.max_position_embeddings)),
        input_scale=scale,
        steps=options.test_steps,
        step_decay=options.step_decay,
        loss=options.depth_loss,
        token_rows=options.token_rows,
        num_clusters=options.num_clusters,
        num_selected=options.num_selected,
        dtype=inputs.dtype,
    )


RECIPE = Recipe(Gemma4MtpOptions, _build)
