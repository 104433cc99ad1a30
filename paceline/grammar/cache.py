"""Results for constraints, kept for the next request with the same constraint.

Responsible for: the limits, in entries and in bytes of constraint text; the least recently used entry is
dropped first. Deliberately does not know: what is kept. For one thread at a time. Called by `checker` and by
the verifier.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from paceline.sampling.params import Constraint

MAX_ENTRIES = 128
MAX_TEXT_BYTES = 1 << 20

T = TypeVar("T")


class ConstraintCache(Generic[T]):
    """Values by constraint."""

    def __init__(self, max_entries: int = MAX_ENTRIES, max_text_bytes: int = MAX_TEXT_BYTES) -> None:
        self._max_entries = max_entries
        self._max_text_bytes = max_text_bytes
        self._values: OrderedDict[Constraint, T] = OrderedDict()
        self._num_text_bytes = 0

    def __len__(self) -> int:
        return len(self._values)

    def get(self, constraint: Constraint) -> T | None:
        """The value, which then counts as used; None if there is none."""
        value = self._values.get(constraint)
        if value is not None:
            self._values.move_to_end(constraint)
        return value

    def put(self, constraint: Constraint, value: T) -> None:
        """Keep a value; others are dropped until the limits are met."""
        if constraint not in self._values:
            self._num_text_bytes += _num_text_bytes(constraint)
        self._values[constraint] = value
        self._values.move_to_end(constraint)
        while len(self._values) > self._max_entries or self._num_text_bytes > self._max_text_bytes:
            oldest, _ = self._values.popitem(last=False)
            self._num_text_bytes -= _num_text_bytes(oldest)


def _num_text_bytes(constraint: Constraint) -> int:
    return len(constraint.text.encode()) + sum(len(choice.encode()) for choice in constraint.choices)
