"""Kept prefixes: what is found is what was run, within a bound, the least recently used going first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.target import PrefixCache, SequenceRows, SlotError, TargetEngine, common_prefix

TEXT = [7 * place % 97 for place in range(40)]


@pytest.fixture
def engine(tiny_model: Callable[[str], Path]) -> Iterator[TargetEngine]:
    with torch.inference_mode():
        yield TargetEngine.load(tiny_model("llama"), dtype=torch.float32)


def run(engine: TargetEngine, tokens: list[int]) -> int:
    slot = engine.open(len(tokens))
    engine.step([SequenceRows(slot, tokens, num_logits="none")])
    return slot


def test_a_kept_slot_goes_on_as_the_text_it_holds(engine: TargetEngine) -> None:
    cache = PrefixCache(engine, 1 << 20)
    cache.keep(run(engine, TEXT), TEXT, None)
    found = cache.find([*TEXT, 3, 4], len(TEXT) + 1, needs_features=False)
    assert found is not None
    assert found[1] == len(TEXT)
    slot = cache.take(found[0])
    assert len(cache) == 0
    again = engine.step([SequenceRows(slot, [3, 4], num_logits="last")]).logits[0]
    whole = engine.step([SequenceRows(engine.open(), [*TEXT, 3, 4], num_logits="last")]).logits[0]
    torch.testing.assert_close(again, whole, rtol=1e-5, atol=1e-5)


def test_the_longest_match_is_found_and_short_ones_are_not(engine: TargetEngine) -> None:
    cache = PrefixCache(engine, 1 << 20)
    for shared in (10, 30, 20):
        text = [*TEXT[:shared], *([96] * 8)]
        cache.keep(run(engine, text), text, None)
    found = cache.find(TEXT, len(TEXT) - 1, needs_features=False)
    assert found is not None
    assert found[1] == 30
    assert cache.find(TEXT[:5], 4, needs_features=False) is None
    assert cache.find(TEXT, len(TEXT) - 1, needs_features=True) is None


def test_the_least_recently_used_goes_first_and_the_bound_holds(engine: TargetEngine) -> None:
    room_for_two = 2 * engine.cache.slot_bytes(run(engine, TEXT))
    cache = PrefixCache(engine, room_for_two)
    texts = [[first, *TEXT] for first in (1, 2, 3)]
    for text in texts[:2]:
        cache.keep(run(engine, text), text, None)
    found = cache.find([*texts[0], 5], len(texts[0]), needs_features=False)
    assert found is not None
    cache.touch(found[0])
    cache.keep(run(engine, texts[2]), texts[2], None)
    assert cache.used_bytes <= room_for_two
    shared = [cache.find([*text, 5], len(text), needs_features=False) for text in texts]
    assert [match is not None for match in shared] == [True, False, True]
    assert cache.evict()
    assert cache.evict()
    assert not cache.evict()
    assert engine.cache.num_slots == 1  # the one that measured


def test_what_adds_nothing_is_closed(engine: TargetEngine) -> None:
    cache = PrefixCache(engine, 1 << 20)
    whole, head = run(engine, TEXT), run(engine, TEXT[:20])
    cache.keep(head, TEXT[:20], None)
    cache.keep(whole, TEXT, None)  # covers the one before
    assert len(cache) == 1
    cache.keep(again := run(engine, TEXT[:30]), TEXT[:30], None)
    assert len(cache) == 1
    for slot in (head, again):
        with pytest.raises(SlotError):
            engine.cache.get(slot)


def test_features_stay_with_their_text(engine: TargetEngine) -> None:
    cache = PrefixCache(engine, 1 << 20)
    rows = torch.arange(20.0).view(10, 2)
    cache.keep(run(engine, TEXT[:10]), TEXT[:10], lambda count: rows[:count])
    cache.keep(run(engine, TEXT), TEXT, None)  # longer, but without: the other one stays for drafters
    found = cache.find(TEXT, len(TEXT) - 1, needs_features=True)
    assert found is not None
    assert found[1] == 10
    assert found[0].features is not None
    assert torch.equal(found[0].features(3), rows[:3])
    assert cache.find(TEXT, len(TEXT) - 1, needs_features=False)[1] == len(TEXT) - 1  # type: ignore[index]


@given(st.lists(st.integers(0, 2), max_size=300), st.lists(st.integers(0, 2), max_size=300), st.data())
def test_common_prefix_is_the_naive_one(one: list[int], other: list[int], data: st.DataObject) -> None:
    if data.draw(st.booleans()):
        other = [*one[: data.draw(st.integers(0, len(one)))], *other]
    limit = data.draw(st.none() | st.integers(0, 320))
    naive = 0
    while naive < min(len(one), len(other)) and one[naive] == other[naive]:
        naive += 1
    assert common_prefix(one, other, limit) == (naive if limit is None else min(naive, limit))
