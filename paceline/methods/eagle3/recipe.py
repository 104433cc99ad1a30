"""How EAGLE-3 is trained: its options, and its objective at a linear start that is fitted on the text."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.methods.eagle.fused_start import default_shape, fit_linear, starting_parameters
from paceline.methods.eagle3.objective import Eagle3Objective
from paceline.training.inputs import FIT_TOKENS, TrainingInputs
from paceline.training.options import option
from paceline.training.recipe import Recipe
from paceline.training.sizes import ModelSizes, default_tap_layers
from paceline.training.target_weights import read_embedding_and_head


@dataclass(frozen=True, slots=True)
class Eagle3Options:
    """Options of EAGLE-3.

    Attributes:
        draft_vocab: tokens that the drafter proposes: the most frequent of the text's answers.
        test_steps: unrolled steps of training-time test.
        step_decay: weight of one such step's loss over that of the step before.
    """

    draft_vocab: int = option(7680, minimum=0)
    test_steps: int = option(4, minimum=1)
    step_decay: float = option(0.8, above=0)


def _build(options: Eagle3Options, inputs: TrainingInputs) -> Eagle3Objective:
    target = ModelSizes.read(inputs.model_dir)
    embedding, head = read_embedding_and_head(inputs.model_dir)
    taps = default_tap_layers(target.num_layers)
    draft_ids = inputs.draft_ids(target.vocab, options.draft_vocab)
    shape = default_shape(target, len(taps), options.draft_vocab, None)
    start = fit_linear(inputs.corpus, embedding, FIT_TOKENS)
    return Eagle3Objective(
        shape,
        starting_parameters(shape, start, head[draft_ids], inputs.seed),
        embedding,
        head,
        draft_ids,
        start.tap_scale,
        inputs.reference(target.max_positions, taps),
        test_steps=options.test_steps,
        step_decay=options.step_decay,
        dtype=inputs.dtype,
    )


RECIPE = Recipe(Eagle3Options, _build)
