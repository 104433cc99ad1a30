"""How PARD-2 is trained: PARD's options with those of its features, and its objective at the same model."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.methods.pard.options import PardOptions, pard_parts
from paceline.methods.pard2.objective import FeatureSettings, Pard2Objective, rms_features
from paceline.training.inputs import TrainingInputs
from paceline.training.options import option
from paceline.training.recipe import Recipe
from paceline.training.target_weights import read_embedding_and_head


@dataclass(frozen=True, slots=True)
class Pard2Options(PardOptions):
    """Options of PARD-2, beside those of PARD.

    Attributes:
        feature_drop: fraction of texts that are learned without the target's features.
        token_weight: weight of the cross entropy beside the divergence from the target.
    """

    keep_floor: float = option(0.1, minimum=0, maximum=1)
    feature_drop: float = option(0.1, minimum=0, below=1)
    token_weight: float = option(0.1, minimum=0)


def _build(options: Pard2Options, inputs: TrainingInputs) -> Pard2Objective:
    parts = pard_parts(options, inputs)
    _, head = read_embedding_and_head(inputs.model_dir)
    return Pard2Objective(
        parts.config,
        parts.weights,
        parts.target,
        head,
        rms_features(inputs.corpus),
        FeatureSettings(drop=options.feature_drop, label_weight=options.token_weight),
        inputs.seed,
        **parts.settings,
    )


RECIPE = Recipe(Pard2Options, _build)
