"""How multi-token prediction modules are trained: their options, and their objective at a fitted projection."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.methods.deepseek_mtp.objective import DeepseekMtpObjective
from paceline.methods.deepseek_mtp.start import default_shape, fit_projection, starting_parameters
from paceline.training.configuration import read_config_json
from paceline.training.inputs import FIT_TOKENS, TrainingInputs
from paceline.training.options import option
from paceline.training.recipe import Recipe
from paceline.training.sizes import ModelSizes
from paceline.training.target_weights import read_embedding_and_head, read_final_norm


@dataclass(frozen=True, slots=True)
class DeepseekMtpOptions:
    """Options of multi-token prediction modules.

    Attributes:
        draft_vocab: tokens that the drafter proposes: the most frequent of the text's answers; 0 for all.
        num_modules: modules in sequence.
        test_steps: depths that are trained; depths past the last module repeat it.
        step_decay: weight of one depth's loss over that of the depth before.
        depth_loss: ce on the text's tokens, or kl to the target's distributions.
        token_rows: rows of a batch whose loss is computed, chosen at random; 0 for all.
    """

    draft_vocab: int = option(7680, minimum=0)
    num_modules: int = option(1, minimum=1)
    test_steps: int = option(4, minimum=1)
    step_decay: float = option(0.8, above=0)
    depth_loss: str = option("ce", choices=("ce", "kl"))
    token_rows: int = option(0, minimum=0)


def _build(options: DeepseekMtpOptions, inputs: TrainingInputs) -> DeepseekMtpObjective:
    config = read_config_json(inputs.model_dir)
    target = ModelSizes.from_config(config)
    embedding, head = read_embedding_and_head(inputs.model_dir)
    final_norm = read_final_norm(inputs.model_dir, target.norm_offset)
    shape = default_shape(target, options.num_modules, config)
    start = fit_projection(inputs.corpus, embedding, final_norm, shape.rms_eps, FIT_TOKENS)
    return DeepseekMtpObjective(
        shape,
        starting_parameters(shape, start, inputs.seed),
        embedding,
        head,
        inputs.reference(target.max_positions),
        steps=options.test_steps,
        step_decay=options.step_decay,
        loss=options.depth_loss,
        token_rows=options.token_rows,
        draft_ids=inputs.draft_ids_or_all(target.vocab, options.draft_vocab),
        dtype=inputs.dtype,
    )


RECIPE = Recipe(DeepseekMtpOptions, _build)
