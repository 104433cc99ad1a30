"""Sequences attended together give what they give alone, and only close neighbours are taken together."""

from __future__ import annotations

import pytest
import torch

from paceline.target import SequenceRows, TapSpec, TargetEngine
from paceline.target.attention import cohort
from paceline.target.attention.attend import Segment
from paceline.target.attention.cohort import Cohort, form_units
from paceline.target.kv.cache import KVCache
from paceline.target.kv.slot import KVLayout
from tests.target.conftest import SHAPE, ModelFactory

CHAIN = [3, 4, 5]
TREE = [-1, 0, 0, 2, -1]


def step_rows(slots: list[int], rounds: int) -> list[SequenceRows]:
    """A mixed round: single rows, chains and trees, in an order that is not that of the slots."""
    rows = []
    for number, slot in enumerate(slots):
        kind = (number + rounds) % 3
        if kind == 0:
            rows.append(SequenceRows(slot, [7 + number]))
        elif kind == 1:
            rows.append(SequenceRows(slot, CHAIN))
        else:
            rows.append(SequenceRows(slot, [11, 12, 13, 14, 15], TREE))
    return rows[::-1]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text"])
def test_together_equals_alone(
    tiny_model: ModelFactory, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = []
    formed = []
    for together in (True, False):
        monkeypatch.setattr(cohort, "CALL_COST_PAIRS", 10_000 if together else -1)
        engine = TargetEngine.load(tiny_model(family), dtype=torch.float64, taps=[TapSpec((2,))])
        everyone = [engine.open() for _ in range(6)]
        for number, slot in enumerate(everyone):
            engine.step([SequenceRows(slot, list(range(1, 4 + 2 * number)), num_logits="none")])
        slots = [slot for number, slot in enumerate(everyone) if number != 2]  # a hole between neighbours
        found = []
        for rounds in range(3):
            batch = step_rows(slots, rounds)
            out = engine.step(batch)
            found += [*out.logits, *out.features]
            for rows in batch:
                engine.keep(rows.slot, [0] if rows.parents is None else [0, 2, 3])
        outputs.append(found)
        segments = [
            Segment(engine.cache.get(slot), 0, 1, engine.length(slot), None, (0,)) for slot in everyone
        ]
        formed.append(len(form_units(segments)))
    assert formed == [1, 6]
    for together, alone in zip(*outputs, strict=True):
        torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-5)


def segments_of(cache: KVCache, shapes: list[tuple[int, int]]) -> list[Segment]:
    """Segments of `(past, rows)` in slots opened one after the other."""
    segments, first = [], 0
    for past, rows in shapes:
        slot = cache.get(cache.open(1024))
        segments.append(Segment(slot, first, rows, past, None, tuple(range(rows))))
        first += rows
    return segments


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([(256, 1)] * 8, [8]),
        ([(256, 5)] * 8, [8]),
        ([(256, 1)] * 10, [8, 2]),  # a block holds eight
        ([(100, 1), (900, 16)], [1, 1]),  # padding would cost more than a call
        ([(0, 200), (300, 1), (310, 1)], [1, 2]),  # a prefill chunk runs by itself
    ],
)
def test_only_close_shapes_join(shapes: list[tuple[int, int]], expected: list[int]) -> None:
    cache = KVCache(KVLayout(1, 1, 8, torch.float32, torch.device("cpu")))
    units = form_units(segments_of(cache, shapes))
    assert [len(unit._segments) if isinstance(unit, Cohort) else 1 for unit in units] == expected
    assert sum(unit.num_rows for unit in units) == sum(rows for _, rows in shapes)


def test_a_slot_left_infinite_does_not_reach_its_successor(tiny_model: ModelFactory) -> None:
    engine = TargetEngine.load(tiny_model("llama"), dtype=torch.float32)
    stays, leaves = engine.open(), engine.open()
    engine.step([SequenceRows(stays, list(range(1, 40)), num_logits="none")])
    engine.step([SequenceRows(leaves, list(range(1, 30)), num_logits="none")])
    for layer in range(SHAPE["num_hidden_layers"]):
        keys, values = engine.keys_values(leaves, layer)
        keys.fill_(float("inf"))
        values.fill_(float("nan"))
    engine.close(leaves)
    fresh = engine.open()
    out = engine.step([SequenceRows(stays, [5]), SequenceRows(fresh, [5])])
    assert bool(torch.isfinite(torch.cat(out.logits)).all())
