"""How EAGLE-1 and EAGLE-2 are trained: their options, and their objective at a start that is fitted on the text."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.methods.eagle.feature_objective import Eagle1Objective
from paceline.methods.eagle.feature_start import default_shape, fit_next_feature, starting_parameters
from paceline.training.inputs import FIT_TOKENS, TrainingInputs
from paceline.training.options import option
from paceline.training.sizes import ModelSizes
from paceline.training.target_weights import read_embedding_and_head


@dataclass(frozen=True, slots=True)
class Eagle1Options:
    """Options of EAGLE-1 and EAGLE-2.

    Attributes:
        draft_vocab: tokens that the drafter proposes: the most frequent of the text's answers; 0 for all.
        feature_weight: weight of the loss on predicted features.
        token_weight: weight of the cross entropy beside it.
        token_rows: rows of a batch whose cross entropy is computed, chosen at random; 0 for all.
        feature_noise: largest entry of the noise that is added to features.
    """

    draft_vocab: int = option(7680, minimum=0)
    feature_weight: float = option(1.0, minimum=0)
    token_weight: float = option(0.1, minimum=0)
    token_rows: int = option(0, minimum=0)
    feature_noise: float = option(0.1, minimum=0)


def build_eagle1(options: Eagle1Options, inputs: TrainingInputs, method: str) -> Eagle1Objective:
    """The objective of a method with EAGLE-1's layer; `method` is what its checkpoints are served as."""
    target = ModelSizes.read(inputs.model_dir)
    embedding, head = read_embedding_and_head(inputs.model_dir)
    shape = default_shape(target)
    start = fit_next_feature(inputs.corpus, embedding, FIT_TOKENS)
    return Eagle1Objective(
        shape,
        starting_parameters(shape, start, inputs.seed),
        embedding,
        head,
        inputs.reference(target.max_positions),
        method=method,
        feature_weight=options.feature_weight,
        token_weight=options.token_weight,
        token_rows=options.token_rows,
        noise=options.feature_noise,
        draft_ids=inputs.draft_ids_or_all(target.vocab, options.draft_vocab),
        dtype=inputs.dtype,
    )
