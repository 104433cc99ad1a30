"""Keys and values of one sequence: its slot, and the block of memory that neighbouring slots share.

A slot stores the rows of a step behind its settled rows, and drops rejected rows without copying the prefix. Slots of
equal capacity are neighbours in a block, so that attention can take several sequences in one call. This file does not
know attention, positions or tokens. Attention and drafters read and write through `Slot` and `KVBlock`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from paceline.contract.errors import PacelineError

CPU_SLOTS_PER_BLOCK = 8


class SlotError(PacelineError):
    """A slot id is not open, or it is used in a way its state does not allow."""

    status = "FAILED_PRECONDITION"
    reason = "BAD_SLOT"


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of one token's keys and values.

    Attributes:
        num_kv_heads: key heads, of the layer that has most.
        head_dim: their width, in the layer where they are widest.
        layer_heads: key heads and their width, layer by layer; empty where all are alike. A smaller layer leaves a part
            of its memory unused.
        joins_neighbours: several sequences may be attended in one call, with rows behind a sequence's end masked.
        values_are_keys: keys are values too, and are stored once (latent attention).
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    layer_heads: tuple[tuple[int, int], ...] = ()
    joins_neighbours: bool = True
    values_are_keys: bool = False

    @property
    def num_stored_heads(self) -> int:
        """Heads that are stored in a layer, of keys and of values together."""
        return self.num_kv_heads if self.values_are_keys else 2 * self.num_kv_heads

    @property
    def bytes_per_token(self) -> int:
        """Bytes one cached token takes over all layers."""
        return self.num_layers * self.num_stored_heads * self.head_dim * self.dtype.itemsize

    def heads(self, layer: int) -> tuple[int, int]:
        """Key heads of a layer, and their width."""
        return self.layer_heads[layer] if self.layer_heads else (self.num_kv_heads, self.head_dim)

    @property
    def slots_per_block(self) -> int:
        """Neighbours that share an allocation. CUDA commits memory at once, so there each slot has its own."""
        return CPU_SLOTS_PER_BLOCK if self.device.type == "cpu" else 1

    @property
    def slots_per_pooled_block(self) -> int:
        """The same for memory of a pool, which is all committed: neighbours only where attention joins them."""
        return self.slots_per_block if self.joins_neighbours else 1


class KVBlock:
    """Slots of equal capacity in one allocation.

    Args:
        layout: of a token.
        capacity: rows of each slot.
        pooled: its memory `[bytes]` uint8 where that comes from a pool, with any content.
    """

    __slots__ = ("capacity", "free", "layers", "layout", "num_dirty_rows", "num_slots", "pooled", "storage")

    def __init__(self, layout: KVLayout, capacity: int, pooled: Tensor | None = None) -> None:
        self.capacity = capacity
        self.layout = layout
        self.pooled = pooled
        self.num_slots = layout.slots_per_block if pooled is None else layout.slots_per_pooled_block
        self.free = list(range(self.num_slots - 1, -1, -1))  # lowest index on top
        self.num_dirty_rows: list[int] = []  # of each slot that was ever opened
        # Slots come first, so that a slot is one piece of memory and a short text touches few pages.
        shape = (
            self.num_slots,
            layout.num_layers,
            layout.num_stored_heads,  # keys first
            capacity,
            layout.head_dim,
        )
        self.storage = _zeros(shape, layout) if pooled is None else pooled.view(layout.dtype).view(*shape)
        self.layers = self.storage.unbind(1)

    @property
    def num_touched(self) -> int:
        """Slots that were ever opened, from the first of the block on: their memory is committed."""
        return len(self.num_dirty_rows)

    def view(self, layer: int, indices: slice, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of rows `first..end` of neighbouring slots: `[slots, kv_heads, end - first, dim]`."""
        heads, dim = self.layout.heads(layer)
        if self.layout.values_are_keys:
            keys = self.layers[layer][indices, :heads, first:end, :dim]
            return keys, keys
        both = self.layers[layer][indices, : 2 * heads, first:end, :dim]
        keys, values = both.unflatten(1, (2, -1)).unbind(1)
        return keys, values


def _zeros(shape: Sequence[int], layout: KVLayout) -> Tensor:
    """Zeroed memory; on CPU pages are committed when they are first written."""
    if layout.device.type != "cpu":
        return torch.zeros(shape, dtype=layout.dtype, device=layout.device)
    # numpy asks the allocator for zeroed pages; torch would write them all.
    num_bytes = int(np.prod(shape)) * layout.dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(layout.dtype).view(*shape)


class Slot:
    """The cache of one sequence.

    `length` rows are settled. Between a step and its `keep`, rows `length .. length + num_pending` hold that step.
    """

    __slots__ = (
        *("block", "index", "layout", "length", "num_pending", "rows", "slot_id", "storage"),
        "__weakref__",
    )

    def __init__(self, slot_id: int, layout: KVLayout, block: KVBlock) -> None:
        self.slot_id = slot_id
        self.layout = layout
        self.length = 0
        self.num_pending = 0
        self._occupy(block)

    def _occupy(self, block: KVBlock) -> None:
        self.block = block
        self.index = block.free.pop()
        self.storage = block.storage[self.index]  # [num_layers, num_stored_heads, capacity, head_dim]
        self.rows = self.storage.unbind(0)
        if self.index == block.num_touched:
            block.num_dirty_rows.append(0 if block.pooled is None else block.capacity)
        # Joined neighbours are attended under a mask, and a mask does not stop an infinity that an earlier text left.
        if self.layout.joins_neighbours:
            self.storage[:, :, : block.num_dirty_rows[self.index]].zero_()
        block.num_dirty_rows[self.index] = 0

    @property
    def capacity(self) -> int:
        """Rows that fit."""
        return self.block.capacity

    def move(self, block: KVBlock) -> None:
        """Move to a block of larger capacity, taking settled and pending rows along."""
        old, used = self.storage, self.length + self.num_pending
        self.leave()
        self._occupy(block)
        self.storage[:, :, :used].copy_(old[:, :, :used])
        self.mark_written(used)

    def mark_written(self, num_rows: int) -> None:
        """Note that the first `num_rows` rows may hold numbers from now on."""
        dirty = self.block.num_dirty_rows
        dirty[self.index] = max(dirty[self.index], num_rows)

    def leave(self) -> None:
        """Give the slot's index in the block back."""
        self.block.free.append(self.index)
        self.block.free.sort(reverse=True)

    def append(self, layer: int, start: int, rows: Tensor) -> None:
        """Write a step's keys and values of one layer.

        Args:
            layer: layer index.
            start: first row, the slot's `length` at the start of the step.
            rows: `[n, 2 * kv_heads, head_dim]`, keys first.
        """
        into = self.rows[layer].narrow(1, start, rows.shape[0])
        if self.layout.values_are_keys:
            rows = rows[:, : into.shape[0]]
        if self.layout.layer_heads:
            into = into[: rows.shape[1], :, : rows.shape[2]]
        into.copy_(rows.transpose(0, 1))

    def view(self, layer: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of rows `first..end`, each `[1, kv_heads, end - first, head_dim]`."""
        rows = self.rows[layer]  # [num_stored_heads, capacity, head_dim]
        heads, width = self.layout.heads(layer)
        _, capacity, dim = rows.shape
        size, stride = (1, heads, end - first, width), (0, capacity * dim, dim, 1)
        start = rows.storage_offset() + first * dim
        # Two operator calls in place of five; this runs once a layer and sequence.
        keys = rows.as_strided(size, stride, start)
        if self.layout.values_are_keys:
            return keys, keys
        return keys, rows.as_strided(size, stride, start + heads * capacity * dim)

    def keep(self, row_indices: Sequence[int]) -> None:
        """Settle the given pending rows, in order, and drop the others.

        Copies only rows that move, over all layers at once, and nothing where all rows are already in place.
        """
        count = len(row_indices)
        in_place = 0
        while in_place < count and row_indices[in_place] == in_place:
            in_place += 1
        # Rows in place ascend by themselves, so that only the rows behind them need a check.
        if in_place > self.num_pending or any(
            row < 0 or row >= self.num_pending for row in row_indices[in_place:]
        ):
            raise SlotError(
                f"slot {self.slot_id} has {self.num_pending} pending rows, not {list(row_indices)}"
            )
        if any(later <= row for row, later in pairwise(row_indices[max(in_place - 1, 0) :])):
            raise SlotError(f"kept rows must ascend, not {list(row_indices)}")
        if in_place < count:
            source = torch.tensor(
                [self.length + row for row in row_indices[in_place:]], device=self.layout.device
            )
            # index_select copies out before the write, so overlapping source and target are safe.
            moved = self.storage.index_select(2, source)
            self.storage.narrow(2, self.length + in_place, count - in_place).copy_(moved)
        self.length += count
        self.num_pending = 0

    def truncate(self, length: int) -> None:
        """Forget everything from row `length` on, pending rows included."""
        if not 0 <= length <= self.length:
            raise SlotError(f"slot {self.slot_id} holds {self.length} rows, cannot truncate to {length}")
        self.length = length
        self.num_pending = 0
