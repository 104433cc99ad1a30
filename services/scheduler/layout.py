"""Checks of stored numbers, and sums that fade, for the JSON layouts of stored measurements.

Deliberately does not know: any layout. Called by the parts of services.scheduler.measurements.
"""

from __future__ import annotations

SCHEMA_VERSION = 3


class SchemaError(ValueError):
    """A stored value has another layout."""


def batch_scale(count: int, half_life: float) -> float:
    """Decayed weight of ``count`` consecutive samples, over their undecayed weight."""
    decay: float = 2.0 ** (-1.0 / half_life)
    weight: float = (1.0 - decay**count) / (count * (1.0 - decay))
    return weight


def faded_sum(old: tuple[float, ...], newer: tuple[float, ...], fade: float) -> tuple[float, ...]:
    """Element by element; the shorter one is padded with zeros."""
    length = max(len(old), len(newer))
    padded_old = (*old, *(0.0,) * (length - len(old)))
    padded_new = (*newer, *(0.0,) * (length - len(newer)))
    return tuple(a * fade + b for a, b in zip(padded_old, padded_new, strict=True))


def integer(value: object, low: int, high: int) -> int:
    """The value, if it is an integer within bounds.

    Raises:
        SchemaError: it is not.
    """
    if type(value) is not int or not low <= value <= high:
        raise SchemaError(f"expected an integer from {low} to {high}, got {value!r}")
    return value


def number(value: object, high: float) -> float:
    """The value, if it is a number from 0 to a limit; NaN is none.

    Raises:
        SchemaError: it is not.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= high:
        raise SchemaError(f"expected a number from 0 to {high}, got {value!r}")
    return float(value)


def text(value: object, max_chars: int = 256) -> str:
    """The value, if it is printable text of bounded length.

    Raises:
        SchemaError: it is not.
    """
    if not isinstance(value, str) or len(value) > max_chars or not (value.isprintable() or not value):
        raise SchemaError(f"expected at most {max_chars} printable characters, got {value!r}")
    return value
