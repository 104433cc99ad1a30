"""Fields of an options dataclass with the values that they may have, and the check of them.

The trainer's own options and those of each method are such dataclasses. Knows none of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from paceline.contract.errors import TrainingDataError

_BOUNDS = "bounds"


@dataclasses.dataclass(frozen=True, slots=True)
class _Bounds:
    minimum: float | None
    maximum: float | None
    above: float | None
    below: float | None
    choices: tuple[str, ...]

    def problem(self, value: Any) -> str | None:
        """What the value must be and is not; None where it fits."""
        if self.choices and value not in self.choices:
            return f"must be {' or '.join(self.choices)}, not {value!r}"
        limits = (
            ("at least", self.minimum, lambda limit: value >= limit),
            ("at most", self.maximum, lambda limit: value <= limit),
            ("above", self.above, lambda limit: value > limit),
            ("below", self.below, lambda limit: value < limit),
        )
        if all(limit is None or fits(limit) for _, limit, fits in limits):
            return None
        wanted = " and ".join(f"{word} {limit:g}" for word, limit, _ in limits if limit is not None)
        return f"must be {wanted}, not {value!r}"


def option(
    default: Any = dataclasses.MISSING,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: Sequence[str] = (),
) -> Any:
    """A field of an options dataclass, with bounds that `check_options` holds it to."""
    bounds = _Bounds(minimum, maximum, above, below, tuple(choices))
    return dataclasses.field(default=default, metadata={_BOUNDS: bounds})


def check_options(options: Any) -> None:
    """Check every field that has bounds; None fits everywhere.

    Raises:
        TrainingDataError: naming the first field whose value does not fit, what it must be, and what it is.
    """
    for field in dataclasses.fields(options):
        value, bounds = getattr(options, field.name), field.metadata.get(_BOUNDS)
        if bounds is None or value is None:
            continue
        if problem := bounds.problem(value):
            raise TrainingDataError(f"{field.name} {problem}")
