"""Memory of the cache: growth, limits, and moving accepted rows in place."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.contract.errors import CapacityError
from paceline.target import KVCacheFullError, SlotError
from paceline.target.kv.cache import MIN_CAPACITY_TOKENS, KVCache
from paceline.target.kv.slot import KVLayout

LAYOUT = KVLayout(2, 3, 4, torch.float32, torch.device("cpu"))


def rows(values: list[int]) -> torch.Tensor:
    """Keys and values that carry one number a row: `[n, 2 * num_kv_heads, head_dim]`."""
    return torch.tensor(values, dtype=torch.float32)[:, None, None].expand(-1, 6, 4)


def write(cache: KVCache, slot_id: int, values: list[int]) -> None:
    cache.reserve([(slot_id, len(values))])
    slot = cache.get(slot_id)
    for layer in range(LAYOUT.num_layers):
        slot.append(layer, slot.length, rows(values))
    slot.num_pending = len(values)


def read(cache: KVCache, slot_id: int) -> list[int]:
    slot = cache.get(slot_id)
    found = []
    for layer in range(LAYOUT.num_layers):
        for part in slot.view(layer, 0, slot.length):
            assert part.shape == (1, 3, slot.length, 4)
            assert bool((part == part[:, :1, :, :1]).all())
            found.append(part[0, 0, :, 0].int().tolist())
    assert all(values == found[0] for values in found)
    return found[0]


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_keep_holds_exactly_the_chosen_rows(data: st.DataObject) -> None:
    cache = KVCache(LAYOUT)
    slot = cache.open(1)
    expected: list[int] = []
    counter = 0
    for _ in range(data.draw(st.integers(1, 8))):
        count = data.draw(st.integers(1, 40))
        values = list(range(counter, counter + count))
        counter += count
        write(cache, slot, values)
        kept = sorted(data.draw(st.sets(st.integers(0, count - 1))))
        cache.get(slot).keep(kept)
        expected += [values[row] for row in kept]
        assert read(cache, slot) == expected
    length = data.draw(st.integers(0, len(expected)))
    cache.get(slot).truncate(length)
    assert read(cache, slot) == expected[:length]


def test_contiguous_rows_are_not_moved() -> None:
    cache = KVCache(LAYOUT)
    slot = cache.open()
    write(cache, slot, [1, 2, 3, 4])
    before = cache.get(slot).view(0, 0, 1)[0].data_ptr()
    version = cache.get(slot).storage._version
    cache.get(slot).keep([0, 1, 2])
    assert cache.get(slot).storage._version == version
    assert cache.get(slot).view(0, 0, 1)[0].data_ptr() == before
    assert read(cache, slot) == [1, 2, 3]


def test_capacity_doubles_and_bytes_are_counted() -> None:
    cache = KVCache(LAYOUT)
    slot = cache.open(1)
    assert cache.used_bytes == MIN_CAPACITY_TOKENS * LAYOUT.bytes_per_token
    write(cache, slot, list(range(MIN_CAPACITY_TOKENS)))
    cache.get(slot).keep(range(MIN_CAPACITY_TOKENS))
    write(cache, slot, [7])
    assert cache.get(slot).capacity == 2 * MIN_CAPACITY_TOKENS
    assert cache.used_bytes == 2 * MIN_CAPACITY_TOKENS * LAYOUT.bytes_per_token
    assert read(cache, slot) == list(range(MIN_CAPACITY_TOKENS))
    cache.close(slot)
    assert cache.used_bytes == 0


def test_a_full_cache_changes_nothing() -> None:
    limit = 2 * MIN_CAPACITY_TOKENS * LAYOUT.bytes_per_token
    cache = KVCache(LAYOUT, limit_bytes=limit)
    first, second = cache.open(), cache.open()
    with pytest.raises(KVCacheFullError) as caught:
        cache.open()
    assert isinstance(caught.value, CapacityError)
    assert (caught.value.used_bytes, caught.value.limit_bytes) == (limit, limit)
    # One of the two would fit if the other did not grow: all or none.
    with pytest.raises(KVCacheFullError):
        cache.reserve([(first, 3), (second, MIN_CAPACITY_TOKENS + 1)])
    assert cache.used_bytes == limit
    cache.close(first)
    cache.reserve([(second, MIN_CAPACITY_TOKENS + 1)])
    assert cache.used_bytes == limit


@pytest.mark.parametrize("kept", [[-1], [4], [1, 1], [2, 1]])
def test_malformed_keeps_are_refused(kept: list[int]) -> None:
    cache = KVCache(LAYOUT)
    slot = cache.open()
    write(cache, slot, [1, 2, 3, 4])
    with pytest.raises(SlotError):
        cache.get(slot).keep(kept)


def test_unknown_slots_are_refused() -> None:
    cache = KVCache(LAYOUT)
    slot = cache.open()
    cache.close(slot)
    for call in (lambda: cache.get(slot), lambda: cache.close(slot), lambda: cache.reserve([(slot, 1)])):
        with pytest.raises(SlotError):
            call()
    assert cache.open() != slot


def test_a_reused_place_holds_nothing_of_its_predecessor() -> None:
    cache = KVCache(LAYOUT)
    stays, leaves = cache.open(), cache.open()
    write(cache, leaves, [7] * 50)
    cache.get(leaves).keep(range(50))
    place = cache.get(leaves).index
    cache.close(leaves)
    again = cache.open()
    assert cache.get(again).index == place
    assert cache.get(again).block is cache.get(stays).block
    assert not cache.get(again).storage.any()


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_slots_that_share_blocks_stay_apart(data: st.DataObject) -> None:
    limit = 40 * MIN_CAPACITY_TOKENS * LAYOUT.bytes_per_token
    cache = KVCache(LAYOUT, limit_bytes=limit)
    expected: dict[int, list[int]] = {}
    for counter in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["open", "write", "write", "close"]))
        if action == "open":
            try:
                expected[cache.open(data.draw(st.sampled_from([1, 90, 128])))] = []
            except KVCacheFullError:
                continue
        elif expected:
            slot = data.draw(st.sampled_from(sorted(expected)))
            if action == "close":
                cache.close(slot)
                del expected[slot]
                continue
            values = [counter] * data.draw(st.integers(1, 100))
            try:
                write(cache, slot, values)
            except KVCacheFullError:
                continue
            cache.get(slot).keep(range(len(values)))
            expected[slot] += values
        for slot, values in expected.items():
            assert read(cache, slot) == values
        assert cache.used_bytes <= limit
        assert cache.num_slots == len(expected)
    for slot in list(expected):
        cache.close(slot)
    assert cache.used_bytes == 0
