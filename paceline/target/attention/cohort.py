"""Several sequences attended in one call, where their slots are neighbours and their shapes are close.

Decides when joining pays, and makes the padding, masks and index lists for it. Joining changes no result beyond
rounding. Called by the planner of a step.

On CPU an attention call over a few rows costs mostly its fixed part: eight decode rows over 256 keys took 0.33 ms
a layer together and 0.49 ms one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.model.torch_block import Scoring
from paceline.target.attention.attend import Segment, Unit, additive, product

# Longer chunks spend their time in the product itself and gain nothing from joining.
MAX_COHORT_ROWS = 16
# Fixed cost of a call, in (row, key) pairs of the product. A member saves it, and an empty slot between costs it.
CALL_COST_PAIRS = 1000


class Cohort:
    """Segments in neighbouring slots of one block, rows consecutive and in slot order."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = segments
        self.first_row = segments[0].first_row
        self.num_rows = sum(segment.num_rows for segment in segments)
        self._block = segments[0].slot.block
        low = segments[0].slot.index
        self._span = segments[-1].slot.index - low + 1
        self._slots = slice(low, low + self._span)
        self._max_rows = max(segment.num_rows for segment in segments)
        self._end = max(segment.total for segment in segments)
        self._masks: dict[tuple[int | None, int], Tensor] = {}
        device = segments[0].slot.layout.device
        places: list[int] = []
        cache_rows: list[int] = []
        padded_rows: list[int] = []
        for segment in segments:
            place = segment.slot.index - low
            places += [place] * segment.num_rows
            cache_rows += range(segment.past, segment.total)
            padded_rows += range(place * self._max_rows, place * self._max_rows + segment.num_rows)
        self._places = torch.tensor(places, device=device)  # [num_rows]
        self._cache_rows = torch.tensor(cache_rows, device=device)  # [num_rows]
        self._to_padded: Tensor | None = None  # [span * max_rows]: source row of each padded row
        self._from_padded: Tensor | None = None  # [num_rows]
        if self.num_rows < self._span * self._max_rows:
            source = [0] * (self._span * self._max_rows)
            for row, padded in enumerate(padded_rows):
                source[padded] = row
            self._to_padded = torch.tensor(source, device=device)
            self._from_padded = torch.tensor(padded_rows, device=device)

    def _first_visible(self, window: int | None) -> int:
        return min(segment.first_visible(window) for segment in self._segments)

    def _mask(self, window: int | None, group: int, dtype: torch.dtype) -> Tensor:
        """Additive mask `[span, 1, max_rows * group, end - first_visible]`."""
        key = (window, group)
        if key not in self._masks:
            first = self._first_visible(window)
            visible = torch.zeros((self._span, self._max_rows, self._end - first), dtype=torch.bool)
            for segment in self._segments:
                own = visible[segment.slot.index - self._slots.start, : segment.num_rows]
                own[:, segment.first_visible(window) - first : segment.total - first] = segment.visible(
                    window
                )
            mask = additive(visible, dtype).repeat_interleave(group, dim=1).unsqueeze(1)
            self._masks[key] = mask.to(self._places.device)
        return self._masks[key]

    def attend(self, queries: Tensor, keys_values: Tensor, layer: int, scoring: Scoring) -> Tensor:
        """Store all members' keys and values, then attend all of them at once."""
        _, group, num_kv_heads, head_dim = queries.shape
        block, window = self._block, scoring.window
        own = block.layers[layer][self._slots, : 2 * num_kv_heads, :, :head_dim]
        cached = own.transpose(1, 2)  # [span, capacity, 2 * kv_heads, head_dim]
        cached.index_put_((self._places, self._cache_rows), keys_values)
        if self._to_padded is not None:
            queries = queries.index_select(0, self._to_padded)
        folded = queries.reshape(self._span, self._max_rows * group, num_kv_heads, head_dim).transpose(1, 2)
        keys, values = block.view(layer, self._slots, self._first_visible(window), self._end)
        mixed = product(folded, keys, values, self._mask(window, group, queries.dtype), scoring)
        rows = mixed.transpose(1, 2).reshape(self._span * self._max_rows, -1)
        return rows if self._from_padded is None else rows.index_select(0, self._from_padded)


def form_units(segments: Sequence[Segment]) -> list[Unit]:
    """Join neighbouring segments where one call is expected to be faster.

    Args:
        segments: in row order, with those of one block consecutive and ordered by slot index.
    """
    units: list[Unit] = []
    open_cohort: list[Segment] = []
    for segment in segments:
        if open_cohort and not _pays([*open_cohort, segment]):
            units.append(_close(open_cohort))
            open_cohort = []
        open_cohort.append(segment)
    if open_cohort:
        units.append(_close(open_cohort))
    return units


def _close(segments: Sequence[Segment]) -> Unit:
    return segments[0] if len(segments) == 1 else Cohort(segments)


def _pays(segments: Sequence[Segment]) -> bool:
    first, last = segments[0].slot, segments[-1].slot
    if first.block is not last.block or max(segment.num_rows for segment in segments) > MAX_COHORT_ROWS:
        return False
    span = last.index - first.index + 1
    rows = max(segment.num_rows for segment in segments)
    keys = max(segment.total for segment in segments)
    useful = sum(segment.num_rows * segment.total for segment in segments)
    wasted = span * rows * keys - useful + (span - len(segments)) * CALL_COST_PAIRS
    return wasted <= (len(segments) - 1) * CALL_COST_PAIRS
