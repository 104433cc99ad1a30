"""Pieces of memory that is faulted in before it is used, and the key-value cache on it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.cpu.memory_pool import MemoryPool
from paceline.target import KVCacheFullError, SlotError
from paceline.target.kv.cache import KVCache
from paceline.target.kv.slot import CPU_SLOTS_PER_BLOCK, KVLayout

PAGE = 4096


@given(st.lists(st.one_of(st.integers(1, 6 * PAGE), st.integers(-8, -1)), max_size=60))
def test_pieces_never_overlap_and_nothing_is_lost(steps: list[int]) -> None:
    """A positive number takes so many bytes, a negative one gives a piece back."""
    pool = MemoryPool(24 * PAGE)
    held: dict[int, torch.Tensor] = {}
    for count, step in enumerate(steps):
        if step < 0 and held:
            key = list(held)[step % len(held)]
            assert bool((held[key] == key).all())
            pool.give_back(held.pop(key))
        elif step > 0:
            piece = pool.take(step)
            if piece is None:
                continue
            assert piece.numel() == step
            held[count + 1] = piece.fill_(count + 1)
    for key, piece in held.items():
        assert bool((piece == key).all())
        pool.give_back(piece)
    assert pool.num_free_bytes == pool.num_bytes
    whole = pool.take(24 * PAGE)
    assert whole is not None
    assert whole.numel() == pool.num_bytes


def test_the_smallest_hole_is_cut() -> None:
    pool = MemoryPool(16 * PAGE)
    pieces = [pool.take(pages * PAGE) for pages in (2, 1, 5, 1, 3, 4)]
    assert all(piece is not None for piece in pieces)
    assert pool.take(1) is None
    for which in (0, 2, 4):  # holes of 2, 5 and 3 pages
        pool.give_back(pieces[which])  # type: ignore[arg-type]  # checked above
    three = pool.take(3 * PAGE)
    assert three is not None
    assert three.data_ptr() == pieces[4].data_ptr()  # type: ignore[union-attr]
    assert pool.take(6 * PAGE) is None
    assert pool.num_free_bytes == 7 * PAGE


def test_faulting_in_ends_with_its_time() -> None:
    now = iter(range(100))
    pool = MemoryPool(160 << 20, limit_s=3.5, clock=lambda: float(next(now)))
    assert pool.num_faulted_bytes == 48 << 20  # looks at 1, 2 and 3 s
    assert MemoryPool(48 << 20, limit_s=0.0).num_faulted_bytes == 0
    assert pool.take(160 << 20) is not None, "the rest is of use all the same"


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux says of a process")
def test_what_is_faulted_in_is_resident() -> None:
    # The most and the least of several: what earlier tests held may be given back meanwhile.
    assert max(_taken_by_pool(1.0) for _ in range(5)) > 60 << 20
    assert min(_taken_by_pool(0.0) for _ in range(5)) < 8 << 20


def _taken_by_pool(limit_s: float) -> int:
    before = resident_bytes()
    pool = MemoryPool(64 << 20, limit_s=limit_s)
    taken = resident_bytes() - before
    del pool
    return taken


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS"))


@pytest.mark.parametrize("joins_neighbours", [False, True])
def test_slots_lie_in_the_pool_as_long_as_it_has_room(joins_neighbours: bool) -> None:
    cache = KVCache(
        KVLayout(2, 3, 4, torch.float32, torch.device("cpu"), joins_neighbours=joins_neighbours),
        make_pool=MemoryPool,
    )
    per_block = CPU_SLOTS_PER_BLOCK if joins_neighbours else 1
    slot_bytes = 64 * cache.layout.bytes_per_token
    cache.commit(2 * per_block * slot_bytes)
    slots = [cache.open(64) for _ in range(2 * per_block + 1)]
    pooled = [cache.get(slot).block.pooled is not None for slot in slots]
    assert pooled == [True] * (2 * per_block) + [False]
    assert cache.used_bytes == len(slots) * slot_bytes
    for slot in slots:
        cache.close(slot)
    assert cache.used_bytes == 0
    assert cache.get(cache.open(64)).block.pooled is not None, "its pieces come back"


def test_a_joined_neighbour_finds_no_number_of_another_text() -> None:
    """Rows behind a sequence's end are masked where several are attended together; an infinity would not be."""
    cache = KVCache(KVLayout(1, 1, 8, torch.float32, torch.device("cpu")), make_pool=MemoryPool)
    cache.commit(CPU_SLOTS_PER_BLOCK * 64 * cache.layout.bytes_per_token)
    first = cache.open(64)
    cache.get(first).block.storage.fill_(float("inf"))
    cache.close(first)
    slot = cache.get(cache.open(64))
    assert slot.block.pooled is not None
    assert bool((slot.storage == 0).all())


def test_the_limit_holds_in_a_pool() -> None:
    layout = KVLayout(2, 3, 4, torch.float32, torch.device("cpu"), joins_neighbours=False)
    cache = KVCache(layout, limit_bytes=3 * 64 * layout.bytes_per_token, make_pool=MemoryPool)
    cache.commit(3 * 64 * layout.bytes_per_token)
    slots = [cache.open(64) for _ in range(3)]
    with pytest.raises(KVCacheFullError):
        cache.open(64)
    with pytest.raises(SlotError, match="before any slot"):
        cache.commit(0)
    cache.close(slots[1])
    assert cache.get(cache.open(64)).block.pooled is not None
