"""How P-EAGLE is trained: its options, and its objective at EAGLE-3's linear start with layers above it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import structlog

from paceline.methods.eagle.fused_start import default_shape, fit_linear
from paceline.methods.p_eagle.objective import PEagleObjective, PEagleShape
from paceline.methods.p_eagle.start import p_eagle_start
from paceline.training.data import Batch
from paceline.training.draft_vocabulary import rarest_token
from paceline.training.inputs import FIT_TOKENS, TrainingInputs
from paceline.training.options import option
from paceline.training.recipe import Recipe
from paceline.training.sizes import ModelSizes, default_tap_layers
from paceline.training.start import answer_mean
from paceline.training.target_weights import read_embedding_and_head

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class PEagleOptions:
    """Options of P-EAGLE.

    Attributes:
        draft_vocab: tokens that the drafter proposes: the most frequent of the text's answers.
        num_layers: layers of the drafter.
        num_depths: tokens drafted in one pass.
        keep_ratio: rows trained at a depth over those of the depth before.
        keep_floor: least fraction of rows at any depth.
        num_segments: segments of a text whose gradients are computed one after the other; more use less memory.
    """

    draft_vocab: int = option(7680, minimum=0)
    num_layers: int = option(4, minimum=1)
    num_depths: int = option(8, minimum=1)
    keep_ratio: float = option(0.7, above=0, maximum=1)
    keep_floor: float = option(0.0, minimum=0, maximum=1)
    num_segments: int = option(1, minimum=1)


def _build(options: PEagleOptions, inputs: TrainingInputs) -> PEagleObjective:
    target = ModelSizes.read(inputs.model_dir)
    embedding, head = read_embedding_and_head(inputs.model_dir)
    taps = default_tap_layers(target.num_layers)
    draft_ids = inputs.draft_ids(target.vocab, options.draft_vocab)
    shape = PEagleShape(
        **asdict(default_shape(target, len(taps), options.draft_vocab, None)),
        num_layers=options.num_layers,
        num_depths=options.num_depths,
        mask_token=rarest_token(inputs.corpus.count_answer_tokens(target.vocab), embedding),
    )
    log.info("p_eagle", mask_token=shape.mask_token)
    start = fit_linear(inputs.corpus, embedding, FIT_TOKENS)
    return PEagleObjective(
        shape,
        p_eagle_start(
            shape, start, answer_mean(inputs.corpus, Batch.need_taps), head[draft_ids], embedding, inputs.seed
        ),
        head,
        draft_ids,
        start.tap_scale,
        inputs.reference(target.max_positions, taps),
        keep_ratio=options.keep_ratio,
        keep_floor=options.keep_floor,
        num_segments=options.num_segments,
        dtype=inputs.dtype,
    )


RECIPE = Recipe(PEagleOptions, _build)
