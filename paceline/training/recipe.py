"""How a method is trained, as the trainer needs to know it. Each method's `recipe.py` has one; knows no method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from paceline.training.inputs import TrainingInputs
from paceline.training.objective import Objective

OptionsT = TypeVar("OptionsT")


def _all_alike(_: Any) -> Mapping[str, float]:
    return {}


@dataclass(frozen=True, slots=True)
class Recipe(Generic[OptionsT]):
    """A method's options, and the objective that they describe.

    Attributes:
        options: a frozen dataclass of the method's own options, which has no field of the trainer's. Its `Attributes:`
            section is the help of the command's flags.
        build: the objective at its starting point, from checked options.
        clip_value: largest entry of a gradient that the method's authors take; 0 for no limit.
        head_prefixes: parameters whose names begin so are as wide as the vocabulary, and take the head's learning rate.
        rate_divisors: by prefix of their names, how many times smaller the learning rate of parameters is that belong
            to the target itself. AdamW always trains them.
    """

    options: type[OptionsT]
    build: Callable[[OptionsT, TrainingInputs], Objective]
    clip_value: float = 0.0
    head_prefixes: tuple[str, ...] = ("lm_head",)
    rate_divisors: Callable[[OptionsT], Mapping[str, float]] = field(default=_all_alike)
