"""The target's features of one sequence, kept for drafters that join late or restart.

Responsible for: storing features, or what they are computed from, in order of position.

A log saves a second pass of the target (EAGLE-3 on SmolLM2: 1.1 kB a token). Where a drafter reads the newest position
alone, the log keeps only that one.

Deliberately does not know: who reads the features, what they mean.

Called by: the feature hub.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def owned(rows: Tensor) -> Tensor:
    """The rows in memory of their own: a stored view would keep all rows of its step alive."""
    return rows.clone() if rows.untyped_storage().nbytes() > 2 * rows.nbytes else rows


class FeatureLog:
    """Features of one sequence's committed positions, from `first` up to `length`.

    A drafter that reads the newest position alone needs nothing older, whenever it joins. With `last_only`, the log
    keeps only the newest position, and positions may be left out.

    Args:
        project: turns captured rows `[n, sources]` into features `[n, width]`.
        last_only: whether only the newest position is kept.

    Attributes:
        first: oldest position that is kept.
        length: position after the newest.
        has_root: whether a token was committed after the newest position, so that a draft can continue there.
    """

    def __init__(self, project: Callable[[Tensor], Tensor], *, last_only: bool = False) -> None:
        self._project = project
        self._chunks: list[Tensor] = []  # each [n, width], in order
        self._captured: list[Tensor] = []  # each [n, sources]: the following positions, not projected yet
        self.last_only = last_only
        self.first = 0
        self.length = 0
        self.has_root = False

    def append(self, start: int, rows: Tensor, *, is_projected: bool = True) -> None:
        """Add the rows of positions from `start` on: from the log's end, or with `last_only` maybe later.

        Args:
            start: position of the first row.
            rows: features `[n, width]`, or captured rows `[n, sources]`.
            is_projected: True for features; captured rows are projected when someone reads them.
        """
        assert start == self.length or (self.last_only and start > self.length)
        self.length = start + int(rows.shape[0])
        if self.last_only:
            self.first, rows = self.length - 1, rows[-1:]
            self._chunks, self._captured = [], []
        rows = owned(rows)
        if is_projected:
            self._project_captured()
        (self._chunks if is_projected else self._captured).append(rows)

    def since(self, start: int) -> tuple[int, Tensor] | None:
        """The kept features of positions from `start` to the end; None if there are none.

        Returns:
            Position of the first row, and `[n, width]`.
        """
        if start >= self.length:
            return None
        self._project_captured()
        if len(self._chunks) > 1:
            self._chunks = [torch.cat(self._chunks)]
        start = max(start, self.first)
        return start, self._chunks[0][start - self.first :]

    def _project_captured(self) -> None:
        if self._captured:
            self._chunks.append(self._project(torch.cat(self._captured)).cpu())
            self._captured = []
