"""How PARD is trained: at a model cut from the target, or at a given one."""

from __future__ import annotations

from paceline.methods.pard.options import PardOptions, pard_parts
from paceline.methods.pard1.objective import Pard1Objective
from paceline.training.inputs import TrainingInputs
from paceline.training.recipe import Recipe


def _build(options: PardOptions, inputs: TrainingInputs) -> Pard1Objective:
    parts = pard_parts(options, inputs)
    return Pard1Objective(parts.config, parts.weights, parts.target, **parts.settings)


RECIPE = Recipe(PardOptions, _build)
