"""Keys and values of running sequences, one preallocated slot each.

Responsible for memory: opening, growing by doubling, appending the rows of a step, and dropping rejected rows
without copying the prefix. It does not know attention, positions or tokens. Called by the engine; the
executors write through `Slot.append` and read through `Slot.view`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from paceline.target.errors import KVCacheFullError, SlotError

MIN_CAPACITY_TOKENS = 64


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of one token's keys and values."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Bytes one cached token takes over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class Slot:
    """The cache of one sequence.

    `length` rows are settled. Between a step and its `keep` the rows of that step lie behind them
    (`length .. length + num_pending`).
    """

    __slots__ = ("_flat", "_layers", "_storage", "capacity", "layout", "length", "num_pending", "slot_id")

    def __init__(self, slot_id: int, layout: KVLayout, capacity: int) -> None:
        self.slot_id = slot_id
        self.layout = layout
        self.length = 0
        self.num_pending = 0
        self._allocate(capacity)

    def _allocate(self, capacity: int) -> None:
        layout = self.layout
        # [num_layers, 2 (k, v), 1, num_kv_heads, capacity, head_dim]
        self._storage = torch.empty(
            (layout.num_layers, 2, 1, layout.num_kv_heads, capacity, layout.head_dim),
            dtype=layout.dtype,
            device=layout.device,
        )
        self.capacity = capacity
        self._layers = self._storage.unbind(0)
        self._flat = self._storage.view(layout.num_layers, -1, capacity, layout.head_dim).unbind(0)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return self.capacity * self.layout.bytes_per_token

    def grow(self, capacity: int) -> None:
        """Move to a larger allocation, keeping settled and pending rows."""
        old, used = self._storage, self.length + self.num_pending
        self._allocate(capacity)
        self._storage[..., :used, :].copy_(old[..., :used, :])

    def append(self, layer: int, start: int, rows: Tensor) -> None:
        """Write a step's keys and values of one layer.

        Args:
            layer: layer index.
            start: first row, the slot's `length` at the start of the step.
            rows: `[n, 2 * num_kv_heads, head_dim]`, keys first.
        """
        self._flat[layer].narrow(1, start, rows.shape[0]).copy_(rows.transpose(0, 1))

    def view(self, layer: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of rows `first..end`, each `[1, num_kv_heads, end - first, head_dim]`."""
        keys, values = self._layers[layer].narrow(3, first, end - first).unbind(0)
        return keys, values

    def keep(self, row_indices: Sequence[int]) -> None:
        """Settle the given pending rows, in order, and drop the others.

        Only the moved rows are copied, over all layers at once; nothing is copied when they are already in
        place.
        """
        count = len(row_indices)
        if any(row < 0 or row >= self.num_pending for row in row_indices):
            raise SlotError(
                f"slot {self.slot_id} has {self.num_pending} pending rows, not {list(row_indices)}"
            )
        if any(later <= row for row, later in pairwise(row_indices)):
            raise SlotError(f"kept rows must ascend, not {list(row_indices)}")
        in_place = 0
        while in_place < count and row_indices[in_place] == in_place:
            in_place += 1
        if in_place < count:
            source = torch.tensor(
                [self.length + row for row in row_indices[in_place:]], device=self.layout.device
            )
            first = self.length + in_place
            # index_select copies out before the write, so overlapping source and target are safe.
            moved = self._storage.index_select(4, source)
            self._storage.narrow(4, first, count - in_place).copy_(moved)
        self.length += count
        self.num_pending = 0

    def truncate(self, length: int) -> None:
        """Forget everything from row `length` on, pending rows included."""
        if not 0 <= length <= self.length:
            raise SlotError(f"slot {self.slot_id} holds {self.length} rows, cannot truncate to {length}")
        self.length = length
        self.num_pending = 0


class KVCache:
    """All slots of one engine, with a byte limit over their allocations."""

    def __init__(self, layout: KVLayout, limit_bytes: int | None = None) -> None:
        self.layout = layout
        self.limit_bytes = limit_bytes
        self._slots: dict[int, Slot] = {}
        self._next_id = 0

    @property
    def used_bytes(self) -> int:
        """Bytes allocated by open slots."""
        return sum(slot.num_bytes for slot in self._slots.values())

    @property
    def num_slots(self) -> int:
        """Open slots."""
        return len(self._slots)

    def open(self, capacity_tokens: int = MIN_CAPACITY_TOKENS) -> int:
        """Allocate a slot.

        Raises:
            KVCacheFullError: the allocation would pass the limit.
        """
        capacity = max(int(capacity_tokens), MIN_CAPACITY_TOKENS)
        self._check_room(capacity * self.layout.bytes_per_token)
        slot_id = self._next_id
        self._next_id += 1
        self._slots[slot_id] = Slot(slot_id, self.layout, capacity)
        return slot_id

    def close(self, slot_id: int) -> None:
        """Free a slot."""
        self.get(slot_id)
        del self._slots[slot_id]

    def get(self, slot_id: int) -> Slot:
        """The slot with this id.

        Raises:
            SlotError: it is not open.
        """
        try:
            return self._slots[slot_id]
        except KeyError:
            raise SlotError(f"slot {slot_id} is not open") from None

    def reserve(self, needs: Sequence[tuple[int, int]]) -> None:
        """Make room for `(slot_id, num_rows)` more rows each: all of them or none.

        Raises:
            KVCacheFullError: growth would pass the limit; no slot was changed.
        """
        grown: list[tuple[Slot, int]] = []
        extra = 0
        for slot_id, num_rows in needs:
            slot = self.get(slot_id)
            needed = slot.length + slot.num_pending + num_rows
            if needed > slot.capacity:
                capacity = slot.capacity
                while capacity < needed:
                    capacity *= 2
                grown.append((slot, capacity))
                extra += (capacity - slot.capacity) * self.layout.bytes_per_token
        if grown:
            self._check_room(extra)
            for slot, capacity in grown:
                slot.grow(capacity)

    def _check_room(self, extra_bytes: int) -> None:
        if self.limit_bytes is not None and self.used_bytes + extra_bytes > self.limit_bytes:
            raise KVCacheFullError(extra_bytes, self.used_bytes, self.limit_bytes)
