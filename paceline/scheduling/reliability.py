"""How confidences of drafted tokens compare with their acceptance: decayed counts over position and confidence.

Responsible for: trials and acceptances by (position in the draft, confidence bin), merging them, the expected
calibration error and the points of a reliability diagram.

Deliberately does not know: what calibrates, which drafter it is, storage.

Called by: the scheduler service (one table for each drafter), and reports on calibration.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.contract.limits import MAX_DRAFT_LENGTH

NUM_BINS = 20
"""Bins of equal width over confidences from 0 to 1, as in DSpark's evaluation (arXiv 2607.05147)."""
HALF_LIFE = 16384.0
"""Trials after which an old trial counts half. The error of what remains is well under 1%."""
_FORGOTTEN = 1e-3


class Cell(NamedTuple):
    """Decayed sums over trials. A trial is a verified token whose predecessors were all accepted."""

    trials: float
    accepted: float
    confidence: float


@dataclass(frozen=True, slots=True)
class Reliability:
    """A table over (position, bin).

    Attributes:
        count: trials ever.
        cells: cells with at least one trial.
    """

    count: int = 0
    cells: Mapping[tuple[int, int], Cell] = field(default_factory=dict)

    @classmethod
    def of(cls, counts: Iterable[tuple[int, float, int, int]]) -> Reliability:
        """From (position from 0, confidence, trials, accepted), all of one age.

        Raises:
            ValueError: a number is out of range.
        """
        cells: dict[tuple[int, int], Cell] = {}
        total = 0
        for position, confidence, trials, accepted in counts:
            if not (
                0 <= position < MAX_DRAFT_LENGTH and 0.0 <= confidence <= 1.0 and 0 <= accepted <= trials
            ):
                raise ValueError(
                    f"{accepted} accepted of {trials} trials at position {position}, confidence {confidence!r}"
                )
            key = position, bin_of(confidence)
            cells[key] = _sum(cells.get(key), Cell(trials, accepted, confidence * trials))
            total += trials
        return cls(total, cells)

    def merged(self, newer: Reliability) -> Reliability:
        """This table with newer trials added; its own counts fade by their number."""
        fade = 2.0 ** (-newer.count / HALF_LIFE)
        cells = {
            key: Cell(cell.trials * fade, cell.accepted * fade, cell.confidence * fade)
            for key, cell in self.cells.items()
            if cell.trials * fade >= _FORGOTTEN
        }
        for key, cell in newer.cells.items():
            cells[key] = _sum(cells.get(key), cell)
        return Reliability(self.count + newer.count, cells)

    @property
    def error(self) -> float:
        """Expected calibration error (Naeini et al., 2015): mean distance of confidence and acceptance, from 0 to
        1.
        """
        bins = self._bins()
        total = math.fsum(cell.trials for cell in bins.values())
        if not total:
            return 0.0
        return math.fsum(abs(cell.confidence - cell.accepted) for cell in bins.values()) / total

    def diagram(self) -> list[tuple[float, float, float]]:
        """(mean confidence, acceptance, decayed trials) of each bin with trials, by rising confidence."""
        return [
            (cell.confidence / cell.trials, cell.accepted / cell.trials, cell.trials)
            for _, cell in sorted(self._bins().items())
        ]

    def by_position(self) -> list[tuple[float, float]]:
        """(acceptance, decayed trials) by position, from 0; acceptance 0 where there were no trials."""
        sums: dict[int, Cell] = {}
        for (position, _), cell in self.cells.items():
            sums[position] = _sum(sums.get(position), cell)
        return [
            (sums[i].accepted / sums[i].trials, sums[i].trials) if i in sums else (0.0, 0.0)
            for i in range(max(sums, default=-1) + 1)
        ]

    def to_dict(self) -> dict[str, Any]:
        """A JSON value. Cells are [position, bin, trials, accepted, sum of confidences]; the error is for people."""
        return {
            "count": self.count,
            "expected_calibration_error": self.error,
            "cells": [[*key, *cell] for key, cell in sorted(self.cells.items())],
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Reliability:
        """Read `to_dict`'s value back.

        Raises:
            ValueError: a number is out of range.
        """
        if type(value["count"]) is not int or not 0 <= value["count"] < 2**53:
            raise ValueError(f"count must be an integer from 0 to 2^53, got {value['count']!r}")
        cells: dict[tuple[int, int], Cell] = {}
        for position, which, *numbers in value["cells"]:
            if type(position) is not int or type(which) is not int or len(numbers) != 3:
                raise ValueError("a cell is [position, bin, trials, accepted, sum of confidences]")
            if any(
                not isinstance(n, int | float) or isinstance(n, bool) or not 0 <= n < 1e12 for n in numbers
            ):
                raise ValueError(f"the counts of a cell must be numbers from 0 to 1e12, got {numbers}")
            cell = Cell(*(float(n) for n in numbers))
            is_plausible = max(cell.accepted, cell.confidence) <= cell.trials * (1 + 1e-9)
            if not (
                0 <= position < MAX_DRAFT_LENGTH and 0 <= which < NUM_BINS and cell.trials and is_plausible
            ):
                raise ValueError(f"cell of position {position}, bin {which} is out of range: {cell}")
            cells[position, which] = cell
        return cls(value["count"], cells)

    def _bins(self) -> dict[int, Cell]:
        bins: dict[int, Cell] = {}
        for (_, which), cell in self.cells.items():
            bins[which] = _sum(bins.get(which), cell)
        return bins


def bin_of(confidence: float) -> int:
    """The bin of a confidence from 0 to 1."""
    return min(int(confidence * NUM_BINS), NUM_BINS - 1)


def _sum(one: Cell | None, other: Cell) -> Cell:
    if one is None:
        return other
    return Cell(one.trials + other.trials, one.accepted + other.accepted, one.confidence + other.confidence)
