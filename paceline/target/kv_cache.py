"""Keys and values of running sequences, one preallocated slot each.

Responsible for memory: opening, growing by doubling, appending the rows of a step, and dropping rejected rows
without copying the prefix. It does not know attention, positions or tokens. Called by the engine; attention
writes and reads through `Slot` and `Block`.

Slots of equal capacity lie side by side in blocks, so that attention can take several sequences in one call. On
CPU they are pieces of a pool (`memory_pool.py`) as long as it has room for them. Beyond it a block is zeroed lazily
by the operating system: slots that were never opened cost no memory, and those that were are faulted in by the step
that writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.contract.errors import CapacityError, PacelineError

MIN_CAPACITY_TOKENS = 64
COMMIT_LIMIT_S = 2.0
"""Most time to commit memory in; the rest is committed when it is first written."""
CPU_SLOTS_PER_BLOCK = 8


class SlotError(PacelineError):
    """A slot id is not open, or it is used in a way its state does not allow."""

    status = "FAILED_PRECONDITION"
    reason = "BAD_SLOT"


class KVCacheFullError(CapacityError):
    """Growing the cache would pass its byte limit; nothing was changed.

    Attributes:
        needed_bytes: allocation that was asked for, on top of what is in use.
        used_bytes: bytes allocated now.
        limit_bytes: the limit.
    """

    reason = "KV_CACHE_FULL"

    def __init__(self, needed_bytes: int, used_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"the KV cache needs {needed_bytes} more bytes, {used_bytes} of {limit_bytes} are allocated"
        )
        self.needed_bytes = needed_bytes
        self.used_bytes = used_bytes
        self.limit_bytes = limit_bytes


class Pool(Protocol):
    """Memory that is committed before it is of use."""

    @property
    def num_faulted_bytes(self) -> int:
        """Bytes that were committed when the pool was made."""

    def take(self, num_bytes: int) -> Tensor | None:
        """A piece `[num_bytes]` uint8, whatever was left in it; None where there is no room."""

    def give_back(self, piece: Tensor) -> None:
        """Take a piece back."""


MakePool = Callable[[int, float], Pool]
"""Makes a pool of so many bytes, in at most so many seconds."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of one token's keys and values.

    Attributes:
        num_kv_heads: key heads, of the layer that has most.
        head_dim: their width, in the layer where they are widest.
        layer_heads: key heads and their width, layer by layer; empty where all are alike. A layer with less leaves a
            part of its room unused.
        joins_neighbours: whether several sequences may be attended in one call, rows behind a sequence's end masked.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    layer_heads: tuple[tuple[int, int], ...] = ()
    joins_neighbours: bool = True

    @property
    def bytes_per_token(self) -> int:
        """Bytes one cached token takes over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def heads(self, layer: int) -> tuple[int, int]:
        """Key heads of a layer, and their width."""
        return self.layer_heads[layer] if self.layer_heads else (self.num_kv_heads, self.head_dim)

    @property
    def slots_per_block(self) -> int:
        """Neighbours that share an allocation; on CUDA memory is committed at once, so none do."""
        return CPU_SLOTS_PER_BLOCK if self.device.type == "cpu" else 1

    @property
    def slots_per_pooled_block(self) -> int:
        """The same for memory of a pool, all of which is committed: none without need."""
        return self.slots_per_block if self.joins_neighbours else 1


class Block:
    """Slots of equal capacity in one allocation.

    Args:
        layout: of a token.
        capacity: rows of each slot.
        pooled: its memory `[bytes]` uint8 where that comes from a pool, whatever is in it.
    """

    __slots__ = ("capacity", "free", "layers", "layout", "num_dirty_rows", "num_slots", "pooled", "storage")

    def __init__(self, layout: KVLayout, capacity: int, pooled: Tensor | None = None) -> None:
        self.capacity = capacity
        self.layout = layout
        self.pooled = pooled
        self.num_slots = layout.slots_per_block if pooled is None else layout.slots_per_pooled_block
        self.free = list(range(self.num_slots - 1, -1, -1))  # lowest index on top
        self.num_dirty_rows: list[int] = []  # of each slot that was ever opened
        # A slot's memory is in one piece: it begins in a few large pages of its own, not in some of every layer.
        shape = (
            self.num_slots,
            layout.num_layers,
            2 * layout.num_kv_heads,  # keys first
            capacity,
            layout.head_dim,
        )
        self.storage = _zeros(shape, layout) if pooled is None else pooled.view(layout.dtype).view(*shape)
        self.layers = self.storage.unbind(1)

    @property
    def num_touched(self) -> int:
        """Slots that were ever opened, the first ones of the block: their memory is committed."""
        return len(self.num_dirty_rows)

    def view(self, layer: int, indices: slice, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of rows `first..end` of neighbouring slots: `[slots, kv_heads, end - first, dim]`."""
        heads, dim = self.layout.heads(layer)
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

    `length` rows are settled. Between a step and its `keep` the rows of that step lie behind them
    (`length .. length + num_pending`).
    """

    __slots__ = (
        *("block", "index", "layout", "length", "num_pending", "rows", "slot_id", "storage"),
        "__weakref__",
    )

    def __init__(self, slot_id: int, layout: KVLayout, block: Block) -> None:
        self.slot_id = slot_id
        self.layout = layout
        self.length = 0
        self.num_pending = 0
        self._occupy(block)

    def _occupy(self, block: Block) -> None:
        self.block = block
        self.index = block.free.pop()
        self.storage = block.storage[self.index]  # [num_layers, 2 * num_kv_heads, capacity, head_dim]
        self.rows = self.storage.unbind(0)
        if self.index == block.num_touched:
            block.num_dirty_rows.append(0 if block.pooled is None else block.capacity)
        # Where neighbours are attended together it is under a mask, and a mask does not stop an infinity left behind.
        if self.layout.joins_neighbours:
            self.storage[:, :, : block.num_dirty_rows[self.index]].zero_()
        block.num_dirty_rows[self.index] = 0

    @property
    def capacity(self) -> int:
        """Rows there is room for."""
        return self.block.capacity

    def move(self, block: Block) -> None:
        """Move to a block of larger capacity, taking settled and pending rows along."""
        old, used = self.storage, self.length + self.num_pending
        self.leave()
        self._occupy(block)
        self.storage[:, :, :used].copy_(old[:, :, :used])
        self.mark_written(used)

    def mark_written(self, num_rows: int) -> None:
        """Note that the first `num_rows` rows may hold something from now on."""
        dirty = self.block.num_dirty_rows
        dirty[self.index] = max(dirty[self.index], num_rows)

    def leave(self) -> None:
        """Give the place in the block back."""
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
        if self.layout.layer_heads:
            into = into[: rows.shape[1], :, : rows.shape[2]]
        into.copy_(rows.transpose(0, 1))

    def view(self, layer: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of rows `first..end`, each `[1, kv_heads, end - first, head_dim]`."""
        rows = self.rows[layer]  # [2 * num_kv_heads, capacity, head_dim]
        heads, width = self.layout.heads(layer)
        _, capacity, dim = rows.shape
        size, stride = (1, heads, end - first, width), (0, capacity * dim, dim, 1)
        start = rows.storage_offset() + first * dim
        # Two operator calls in place of five; this runs once a layer and sequence.
        keys = rows.as_strided(size, stride, start)
        return keys, rows.as_strided(size, stride, start + heads * capacity * dim)

    def keep(self, row_indices: Sequence[int]) -> None:
        """Settle the given pending rows, in order, and drop the others.

        Only the moved rows are copied, over all layers at once; nothing is copied when they are already in place.
        """
        count = len(row_indices)
        in_place = 0
        while in_place < count and row_indices[in_place] == in_place:
            in_place += 1
        # What is in its place ascends, so that its end says all; the rest is looked at row by row.
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


def capacity_class(tokens: int) -> int:
    """The capacity given to a sequence of so many tokens: 64, 96, 128, 192, 256, ... so that slots match."""
    capacity = MIN_CAPACITY_TOKENS
    while capacity < tokens:
        if capacity + capacity // 2 >= tokens:
            return capacity + capacity // 2
        capacity *= 2
    return capacity


class KVCache:
    """All slots of one engine, with a byte limit over the memory they commit.

    Args:
        layout: of a token.
        limit_bytes: most bytes of slots; None for no limit.
        make_pool: commits memory early; None where there is nothing to commit.
    """

    def __init__(
        self, layout: KVLayout, limit_bytes: int | None = None, make_pool: MakePool | None = None
    ) -> None:
        self.layout = layout
        self.limit_bytes = limit_bytes
        self._make_pool = make_pool
        self._pool: Pool | None = None
        self._slots: dict[int, Slot] = {}
        self._blocks: dict[int, list[Block]] = {}  # by capacity
        self._next_id = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of open slots, and of closed ones whose block is still in use."""
        return sum(
            block.num_touched * capacity * self.layout.bytes_per_token
            for capacity, blocks in self._blocks.items()
            for block in blocks
        )

    @property
    def num_slots(self) -> int:
        """Open slots."""
        return len(self._slots)

    def commit(self, num_bytes: int, limit_s: float = COMMIT_LIMIT_S) -> int:
        """Commit memory now, so that no step pays for it: slots are placed there as long as it has room.

        It stays committed whether slots lie in it or not. A limit should be at least as large; what lies in holes that
        are too small for any slot then comes on top of it. On other devices than CPUs nothing is to be done.

        Args:
            num_bytes: how much.
            limit_s: most seconds to spend; the rest is committed by the steps that write it.

        Returns:
            The bytes that are committed now.

        Raises:
            SlotError: a slot is open.
        """
        if self._slots:
            raise SlotError("memory is committed before any slot is open")
        if self._make_pool is None:
            return 0
        self._pool = self._make_pool(num_bytes, limit_s)
        return self._pool.num_faulted_bytes

    def slot_bytes(self, slot_id: int) -> int:
        """Bytes of one open slot, its room to grow included."""
        return self.get(slot_id).capacity * self.layout.bytes_per_token

    def open(self, capacity_tokens: int = MIN_CAPACITY_TOKENS) -> int:
        """Allocate a slot.

        Raises:
            KVCacheFullError: the allocation would pass the limit.
        """
        capacity = capacity_class(capacity_tokens)
        self._check_room({capacity: 1}, {})
        slot_id = self._next_id
        self._next_id += 1
        self._slots[slot_id] = Slot(slot_id, self.layout, self._free_block(capacity))
        return slot_id

    def close(self, slot_id: int) -> None:
        """Free a slot."""
        slot = self.get(slot_id)
        del self._slots[slot_id]
        slot.leave()
        self._drop_if_empty(slot.block)

    def fork(self, slot_id: int, length: int, capacity_tokens: int = 0) -> int:
        """Allocate a slot that starts with the first `length` settled rows of another.

        Raises:
            SlotError: the other slot has fewer rows.
            KVCacheFullError: the allocation would pass the limit.
        """
        source = self.get(slot_id)
        if not 0 <= length <= source.length:
            raise SlotError(f"slot {slot_id} holds {source.length} rows, cannot fork {length}")
        copy_id = self.open(max(capacity_tokens, length))
        copy = self.get(copy_id)
        copy.storage[:, :, :length].copy_(source.storage[:, :, :length])
        copy.length = length
        copy.mark_written(length)
        return copy_id

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

        Growing needs the old and the new place for the time of the copy; the limit holds before and after it.

        Raises:
            KVCacheFullError: growth would pass the limit; no slot was changed.
        """
        growing: list[tuple[Slot, int]] = []
        wanted: dict[int, int] = {}
        leaving: dict[Block, int] = {}
        for slot_id, num_rows in needs:
            slot = self.get(slot_id)
            needed = slot.length + slot.num_pending + num_rows
            if needed > slot.capacity:
                capacity = slot.capacity
                while capacity < needed:
                    capacity *= 2
                growing.append((slot, capacity))
                wanted[capacity] = wanted.get(capacity, 0) + 1
                leaving[slot.block] = leaving.get(slot.block, 0) + 1
        if growing:
            self._check_room(wanted, leaving)
        for slot, capacity in growing:
            old = slot.block
            slot.move(self._free_block(capacity))
            self._drop_if_empty(old)
        for slot_id, num_rows in needs:
            slot = self.get(slot_id)
            slot.mark_written(slot.length + slot.num_pending + num_rows)

    def _free_block(self, capacity: int) -> Block:
        blocks = self._blocks.setdefault(capacity, [])
        for block in blocks:
            if block.free:
                return block
        num_bytes = self.layout.slots_per_pooled_block * capacity * self.layout.bytes_per_token
        pooled = None if self._pool is None else self._pool.take(num_bytes)
        blocks.append(Block(self.layout, capacity, pooled))
        return blocks[-1]

    def _drop_if_empty(self, block: Block) -> None:
        if len(block.free) == block.num_slots:
            self._blocks[block.capacity].remove(block)
            if block.pooled is not None and self._pool is not None:
                self._pool.give_back(block.pooled)

    def _check_room(self, wanted: dict[int, int], leaving: dict[Block, int]) -> None:
        """Raise if `wanted` more slots by capacity pass the limit, once `leaving` slots have left their blocks."""
        if self.limit_bytes is None:
            return
        per_token = self.layout.bytes_per_token
        extra = 0
        for capacity, count in wanted.items():
            reusable = sum(
                sum(index < block.num_touched for index in block.free)
                for block in self._blocks.get(capacity, ())
            )
            extra += max(0, count - reusable) * capacity * per_token
        for block, count in leaving.items():
            if len(block.free) + count == block.num_slots and block.capacity not in wanted:
                extra -= block.num_touched * block.capacity * per_token
        if self.used_bytes + extra > self.limit_bytes:
            raise KVCacheFullError(extra, self.used_bytes, self.limit_bytes)
