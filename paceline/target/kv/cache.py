"""The key-value cache: one preallocated slot per sequence, within a limit of bytes.

Opens, grows and closes slots, and counts their memory. It does not know attention, positions or tokens. Called by the
engine and by drafters.

On CPU a block of slots is a piece of a pool as long as the pool has memory left (`paceline.cpu.memory_pool`). Beyond
the pool the operating system zeroes memory lazily: slots that were never opened cost nothing, and the step that first
writes a page pays for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from paceline.contract.errors import CapacityError
from paceline.target.kv.slot import KVBlock, KVLayout, Slot, SlotError

MIN_CAPACITY_TOKENS = 64
COMMIT_LIMIT_S = 2.0
"""Most time to commit memory in; the rest is committed when it is first written."""


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


def capacity_class(tokens: int) -> int:
    """Capacity of a slot for so many tokens: 64, 96, 128, 192, 256, ... Few classes let slots share blocks."""
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
        self._blocks: dict[int, list[KVBlock]] = {}  # by capacity
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
        """Commit memory now, so that no step pays for it. Slots are placed in it as long as they fit.

        The memory stays committed whether slots use it or not, so `limit_bytes` should be at least as large. Other
        devices than CPUs have nothing to commit.

        Args:
            num_bytes: how much.
            limit_s: most seconds to spend; steps commit the rest when they write it.

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
        """Bytes of one open slot, its unused capacity included."""
        return self.get(slot_id).capacity * self.layout.bytes_per_token

    def open(self, capacity_tokens: int = MIN_CAPACITY_TOKENS) -> int:
        """Allocate a slot.

        Raises:
            KVCacheFullError: the allocation would pass the limit.
        """
        capacity = capacity_class(capacity_tokens)
        self._check_capacity({capacity: 1}, {})
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
        """Grow slots to fit `(slot_id, num_rows)` more rows each: all of them or none.

        During the copy a slot has its old and its new memory; the limit holds before and after the copy.

        Raises:
            KVCacheFullError: growth would pass the limit; no slot was changed.
        """
        growing: list[tuple[Slot, int]] = []
        wanted: dict[int, int] = {}
        leaving: dict[KVBlock, int] = {}
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
            self._check_capacity(wanted, leaving)
        for slot, capacity in growing:
            old = slot.block
            slot.move(self._free_block(capacity))
            self._drop_if_empty(old)
        for slot_id, num_rows in needs:
            slot = self.get(slot_id)
            slot.mark_written(slot.length + slot.num_pending + num_rows)

    def _free_block(self, capacity: int) -> KVBlock:
        blocks = self._blocks.setdefault(capacity, [])
        for block in blocks:
            if block.free:
                return block
        num_bytes = self.layout.slots_per_pooled_block * capacity * self.layout.bytes_per_token
        pooled = None if self._pool is None else self._pool.take(num_bytes)
        blocks.append(KVBlock(self.layout, capacity, pooled))
        return blocks[-1]

    def _drop_if_empty(self, block: KVBlock) -> None:
        if len(block.free) == block.num_slots:
            self._blocks[block.capacity].remove(block)
            if block.pooled is not None and self._pool is not None:
                self._pool.give_back(block.pooled)

    def _check_capacity(self, wanted: dict[int, int], leaving: dict[KVBlock, int]) -> None:
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
