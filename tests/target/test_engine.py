"""The step's contract: validation before change, what is returned for whom, and how a step is settled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.target import (
    KVCacheFullError,
    SequenceRows,
    SlotError,
    StepError,
    TapSpec,
    TargetEngine,
    UnsupportedModelError,
)
from tests.target.conftest import SHAPE, ModelFactory

HIDDEN, VOCAB, LAYERS = SHAPE["hidden_size"], SHAPE["vocab_size"], SHAPE["num_hidden_layers"]


@pytest.fixture
def engine(tiny_model: ModelFactory) -> TargetEngine:
    return TargetEngine.load(tiny_model("llama"), dtype=torch.float32)


def test_shapes_of_a_mixed_step(engine: TargetEngine) -> None:
    projection = torch.randn(10, 3 * HIDDEN)
    assert engine.add_tap(TapSpec((0, LAYERS), norm_final=True, projection=projection)) == 0
    assert engine.add_tap(TapSpec((2,))) == 1
    a, b, c, d = (engine.open() for _ in range(4))
    out = engine.step(
        [
            SequenceRows(a, [1, 2, 3], num_logits="last"),
            SequenceRows.decode(b, 4, [5, 6, 7], [-1, -1, 0]),
            SequenceRows(c, [8, 9], num_logits="none", wants_features=False),
            SequenceRows(d, [1, 2, 3, 4], num_logits=[3, 0]),
        ]
    )
    assert [tuple(x.shape) for x in out.logits] == [(1, VOCAB), (4, VOCAB), (0, VOCAB), (2, VOCAB)]
    assert {x.dtype for x in out.logits} == {torch.float32}
    assert [x.shape[0] for x in out.features] == [3, 4, 0, 4]
    assert {x.shape[1] for x in out.tap_features[0]} == {10}
    assert {x.shape[1] for x in out.tap_features[1]} == {HIDDEN}
    assert [engine.length(slot) for slot in (a, b, c, d)] == [3, 4, 2, 4]


def test_explicit_logit_rows_come_in_the_order_asked(engine: TargetEngine) -> None:
    tokens = [5, 6, 7, 8]
    whole = engine.step([SequenceRows(engine.open(), tokens)]).logits[0]
    picked = engine.step([SequenceRows(engine.open(), tokens, num_logits=[2, 0])]).logits[0]
    torch.testing.assert_close(picked, whole[[2, 0]])


def test_projection_is_applied_to_the_concatenation(engine: TargetEngine) -> None:
    projection = torch.randn(7, 2 * HIDDEN)
    engine.add_tap(TapSpec((1, 3)))
    engine.add_tap(TapSpec((1, 3), projection=projection))
    out = engine.step([SequenceRows(engine.open(), [3, 4, 5])])
    torch.testing.assert_close(
        out.tap_features[1][0], out.tap_features[0][0] @ projection.T, rtol=1e-4, atol=1e-4
    )


def test_head_of_the_final_norm_is_the_logits(engine: TargetEngine) -> None:
    engine.add_tap(TapSpec(norm_final=True))
    out = engine.step([SequenceRows(engine.open(), [3, 4, 5])])
    torch.testing.assert_close(engine.head(out.features[0]), out.logits[0])
    engine.add_tap(TapSpec((0,)))
    out = engine.step([SequenceRows(engine.open(), [3, 4, 5])])
    torch.testing.assert_close(out.tap_features[1][0], engine.embed([3, 4, 5]))


@pytest.mark.parametrize(
    "bad",
    [
        {"tokens": []},
        {"tokens": [VOCAB]},
        {"tokens": [-1]},
        {"tokens": [1, 2], "parents": [-1]},
        {"tokens": [1, 2], "parents": [-1, 1]},
        {"tokens": [1, 2], "parents": [-2, 0]},
        {"tokens": [1, 2], "num_logits": [2]},
        {"tokens": [1, 2], "num_logits": "some"},
        {"tokens": [1] * (SHAPE["max_position_embeddings"] + 1)},
    ],
)
def test_malformed_rows_change_nothing(engine: TargetEngine, bad: dict[str, object]) -> None:
    good, other = engine.open(), engine.open()
    engine.step([SequenceRows(good, [1, 2, 3])])
    with pytest.raises(StepError):
        engine.step([SequenceRows(good, [4]), SequenceRows(other, **bad)])  # type: ignore[arg-type]
    assert (engine.length(good), engine.length(other)) == (3, 0)


def test_a_slot_appears_once(engine: TargetEngine) -> None:
    slot = engine.open()
    with pytest.raises(StepError, match="once"):
        engine.step([SequenceRows(slot, [1]), SequenceRows(slot, [2])])


def test_trees_must_be_settled_and_kept_rows_must_be_a_path(engine: TargetEngine) -> None:
    slot = engine.open()
    engine.step([SequenceRows.decode(slot, 1, [2, 3, 4], [-1, -1, 1])])
    for call in (
        lambda: engine.step([SequenceRows(slot, [5])]),
        lambda: engine.truncate(slot, 0),
        lambda: engine.keep(slot, [0, 1, 2]),
        lambda: engine.keep(slot, [1]),
        lambda: engine.keep(slot, [0, 2, 9]),
    ):
        with pytest.raises(SlotError):
            call()
    engine.keep(slot, [0, 2, 3])
    assert engine.length(slot) == 3
    with pytest.raises(SlotError, match="no step"):
        engine.keep(slot, [0])


def test_keep_of_a_chain_may_drop_its_tail_or_everything(engine: TargetEngine) -> None:
    slot = engine.open()
    engine.step([SequenceRows(slot, [1, 2, 3])])
    engine.keep(slot, [0, 1])
    assert engine.length(slot) == 2
    engine.step([SequenceRows(slot, [4, 5])])
    engine.keep(slot, [])
    assert engine.length(slot) == 2
    engine.step([SequenceRows(slot, [4])])
    engine.truncate(slot, 1)
    assert engine.length(slot) == 1


def test_a_full_cache_leaves_all_sequences_as_they_were(tiny_model: ModelFactory) -> None:
    probe = TargetEngine.load(tiny_model("llama"), dtype=torch.float32)
    probe.open()
    engine = TargetEngine.load(
        tiny_model("llama"), dtype=torch.float32, kv_limit_bytes=2 * probe.cache.used_bytes
    )
    a, b = engine.open(), engine.open()
    engine.step([SequenceRows(a, [1, 2])])
    with pytest.raises(KVCacheFullError):
        engine.step([SequenceRows(a, [3]), SequenceRows(b, [1] * 100)])
    assert (engine.length(a), engine.length(b)) == (2, 0)
    engine.close(b)
    engine.step([SequenceRows(a, [1] * 100)])


def test_row_buckets_make_a_row_independent_of_how_many_run_beside_it(tiny_model: ModelFactory) -> None:
    engine = TargetEngine.load(tiny_model("llama"), dtype=torch.bfloat16, row_buckets=(8,))
    tokens = [9, 8, 7, 6, 5]
    alone, beside = engine.open(), engine.open()
    for slot in (alone, beside):
        engine.step([SequenceRows(slot, [1, 2, 3])])
    one = engine.step([SequenceRows.decode(alone, tokens[0])]).logits[0][0]
    many = engine.step([SequenceRows.decode(beside, tokens[0], tokens[1:])]).logits[0][0]
    torch.testing.assert_close(one, many, rtol=0, atol=0.05)


def test_an_empty_step_is_empty(engine: TargetEngine) -> None:
    assert engine.step([]).logits == []


@pytest.mark.parametrize(
    "spec",
    [
        TapSpec(),
        TapSpec((LAYERS + 1,)),
        TapSpec((-1,)),
        TapSpec((0,), projection=torch.zeros(4, HIDDEN + 1)),
    ],
)
def test_taps_that_do_not_fit_are_refused(engine: TargetEngine, spec: TapSpec) -> None:
    with pytest.raises(StepError):
        engine.add_tap(spec)


def test_keys_and_values_are_readable(engine: TargetEngine) -> None:
    slot = engine.open()
    engine.step([SequenceRows(slot, [1, 2, 3])])
    keys, values = engine.keys_values(slot, LAYERS - 1)
    shape = (SHAPE["num_key_value_heads"], 3, SHAPE["head_dim"])
    assert keys.shape == shape
    assert values.shape == shape


def test_directories_without_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError):
        TargetEngine.load(tmp_path)


def test_a_fork_continues_like_its_source_and_apart_from_it(engine: TargetEngine) -> None:
    source = engine.open()
    engine.step([SequenceRows(source, [1, 2, 3, 4, 5], num_logits="none")])
    copy = engine.fork(source, 3)
    assert engine.length(copy) == 3
    fresh = engine.open()
    expected = engine.step([SequenceRows(fresh, [1, 2, 3, 9])]).logits[0][-1]
    forked = engine.step([SequenceRows(copy, [9])]).logits[0][-1]
    torch.testing.assert_close(forked, expected, rtol=1e-5, atol=1e-4)
    engine.close(copy)
    again = engine.step([SequenceRows(source, [6])]).logits[0][-1]
    whole = engine.step([SequenceRows(engine.open(), [1, 2, 3, 4, 5, 6])]).logits[0][-1]
    torch.testing.assert_close(again, whole, rtol=1e-5, atol=1e-4)
    with pytest.raises(SlotError, match="cannot fork"):
        engine.fork(source, 7)
