"""How Medusa-1 is trained: its options, and its objective at heads that begin as a linear look-ahead."""

from __future__ import annotations

from paceline.methods.medusa1.objective import Medusa1Objective
from paceline.methods.medusa_heads.options import HeadOptions, starting_heads
from paceline.training.inputs import TrainingInputs
from paceline.training.recipe import Recipe
from paceline.training.sizes import ModelSizes


def _build(options: HeadOptions, inputs: TrainingInputs) -> Medusa1Objective:
    target = ModelSizes.read(inputs.model_dir)
    heads = starting_heads(options, inputs, target)
    return Medusa1Objective(heads, inputs.reference(target.max_positions), options.step_decay)


RECIPE = Recipe(HeadOptions, _build)
