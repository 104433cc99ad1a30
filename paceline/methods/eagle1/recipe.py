"""How EAGLE-1 is trained."""

from __future__ import annotations

from functools import partial

from paceline.methods.eagle.feature_training import Eagle1Options, build_eagle1
from paceline.training.recipe import Recipe

RECIPE = Recipe(Eagle1Options, partial(build_eagle1, method="eagle1"), clip_value=0.5)
