"""Draft and commit batches: round trips, and no array content that gets past the checks."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.contract.errors import StreamProtocolError
from paceline.drafts import DraftEntry
from paceline.v1 import peer_pb2
from services.runtime import frames
from services.runtime.frames import Commit, pack_drafts, unpack_commits, unpack_drafts

VOCAB = 50
U64, U32 = st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)


@st.composite
def entries(draw: st.DrawFn, *, with_log_probs: bool) -> tuple[int, int, DraftEntry]:
    size = draw(st.integers(1, 8))
    parents = tuple(draw(st.integers(-1, i - 1)) for i in range(size))
    tokens = tuple(draw(st.lists(st.integers(0, VOCAB - 1), min_size=size, max_size=size)))
    log_probs = tuple(
        draw(st.lists(st.floats(-30, 0, width=32), min_size=size, max_size=size)) if with_log_probs else ()
    )
    entry = DraftEntry(
        start=draw(st.integers(1, 2**20)), tokens=tokens, parents=parents, log_probs=log_probs, confidences=()
    )
    return draw(st.integers(1, 2**64 - 1)), draw(U32), entry


@given(
    st.booleans().flatmap(lambda with_log_probs: st.lists(entries(with_log_probs=with_log_probs), max_size=6))
)
@settings(deadline=None)
def test_drafts_round_trip(items: list[tuple[int, int, DraftEntry]]) -> None:
    wire = pack_drafts(items).SerializeToString()
    assert unpack_drafts(peer_pb2.DraftBatch.FromString(wire), VOCAB) == (items, 0)


def test_one_entry_without_log_probs_takes_them_from_the_batch() -> None:
    known = DraftEntry(start=3, tokens=(1,), parents=(-1,), log_probs=(-0.5,), confidences=())
    unknown = DraftEntry(start=3, tokens=(2,), parents=(-1,), log_probs=(), confidences=())
    unpacked, num_malformed = unpack_drafts(pack_drafts([(1, 0, known), (1, 0, unknown)]), VOCAB)
    assert num_malformed == 0
    assert [entry.log_probs for _, _, entry in unpacked] == [(), ()]


GOOD = DraftEntry(start=3, tokens=(1, 2), parents=(-1, 0), log_probs=(-0.5, -1.0), confidences=())


@pytest.mark.parametrize(
    "change",
    [
        {"sequence_id": 0},
        {"starts": 0},
        {"tokens": VOCAB},
        {"tokens": 2**32 - 1},
        {"parents": -2},
        {"parents": 1},
        {"log_probs": math.nan},
        {"log_probs": math.inf},
        {"log_probs": 0.1},
        {"log_probs": -math.inf},
    ],
)
def test_one_bad_entry_is_dropped_and_its_neighbours_live(change: dict[str, float]) -> None:
    batch = pack_drafts([(1, 0, GOOD), (2, 0, GOOD), (3, 0, GOOD)])
    for name, value in change.items():
        if name == "sequence_id":
            batch.sequence_ids[1] = int(value)
        elif name == "starts":
            batch.starts[1] = int(value)
        else:
            getattr(batch, name)[3] = value  # the second token of the second entry
    unpacked, num_malformed = unpack_drafts(batch, VOCAB)
    assert [sequence_id for sequence_id, _, _ in unpacked] == [1, 3]
    assert num_malformed == 2


def test_log_probs_just_above_zero_are_rounding() -> None:
    batch = pack_drafts([(1, 0, GOOD)])
    batch.log_probs[0] = 1e-4
    (_, _, entry), *_ = unpack_drafts(batch, VOCAB)[0]
    assert entry.log_probs[0] == 0.0


def test_limits_drop_the_surplus(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = pack_drafts([(i, 0, GOOD) for i in range(1, 6)])
    with monkeypatch.context() as patch:
        patch.setattr(frames, "MAX_ENTRIES", 2)
        unpacked, num_malformed = unpack_drafts(batch, VOCAB)
    assert [sequence_id for sequence_id, _, _ in unpacked] == [1, 2]
    assert num_malformed == 6
    for limit, value in (("MAX_DRAFT_NODES", 1), ("MAX_POSITIONS", 2)):
        with monkeypatch.context() as patch:
            patch.setattr(frames, limit, value)
            assert unpack_drafts(batch, VOCAB) == ([], 10)


ANY_BATCH = st.builds(
    peer_pb2.DraftBatch,
    sequence_ids=st.lists(U64, max_size=4),
    epochs=st.lists(U32, max_size=4),
    starts=st.lists(U32, max_size=4),
    sizes=st.lists(st.integers(0, 3) | U32, max_size=4),
    tokens=st.lists(st.integers(0, VOCAB) | U32, max_size=8),
    parents=st.lists(st.integers(-2, 3) | st.integers(-(2**31), 2**31 - 1), max_size=8),
    log_probs=st.lists(st.floats(width=32), max_size=8),
)


def check_entries(batch: peer_pb2.DraftBatch) -> None:
    unpacked, num_malformed = unpack_drafts(batch, VOCAB)
    assert num_malformed >= 0
    if len(batch.sequence_ids) > len(unpacked):
        assert num_malformed > 0
    for sequence_id, _, entry in unpacked:
        assert sequence_id > 0
        assert entry.start >= 1
        assert 1 <= len(entry.tokens) == len(entry.parents) <= 64
        assert len(entry.log_probs) in (0, len(entry.tokens))
        assert all(0 <= token < VOCAB for token in entry.tokens)
        assert all(-1 <= parent < i for i, parent in enumerate(entry.parents))
        assert all(math.isfinite(value) and value <= 0 for value in entry.log_probs)


@given(ANY_BATCH)
@settings(deadline=None, max_examples=300)
def test_any_arrays_yield_only_good_entries(batch: peer_pb2.DraftBatch) -> None:
    check_entries(batch)


@given(
    items=st.lists(entries(with_log_probs=True), min_size=1, max_size=4),
    position=st.integers(0, 10_000),
    byte=st.integers(0, 255),
)
@settings(deadline=None, max_examples=300)
def test_a_changed_byte_yields_only_good_entries(
    items: list[tuple[int, int, DraftEntry]], position: int, byte: int
) -> None:
    wire = bytearray(pack_drafts(items).SerializeToString())
    wire[position % len(wire)] = byte
    batch = peer_pb2.DraftBatch()
    try:
        batch.ParseFromString(bytes(wire))
    except Exception:  # protobuf's own refusal
        return
    check_entries(batch)


COMMITS = st.lists(
    st.builds(
        Commit,
        sequence_id=st.integers(1, 2**64 - 1),
        epoch=U32,
        start=st.integers(1, 2**20),
        tokens=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5).map(tuple),
    ),
    max_size=5,
)


def pack_commits(commits: list[Commit]) -> peer_pb2.CommitBatch:
    return peer_pb2.CommitBatch(
        sequence_ids=[commit.sequence_id for commit in commits],
        epochs=[commit.epoch for commit in commits],
        starts=[commit.start for commit in commits],
        sizes=[len(commit.tokens) for commit in commits],
        tokens=[token for commit in commits for token in commit.tokens],
    )


@given(COMMITS)
@settings(deadline=None)
def test_commits_round_trip(commits: list[Commit]) -> None:
    wire = pack_commits(commits).SerializeToString()
    assert unpack_commits(peer_pb2.CommitBatch.FromString(wire), VOCAB) == commits


@given(
    st.builds(
        peer_pb2.CommitBatch,
        sequence_ids=st.lists(U64, max_size=3),
        epochs=st.lists(U32, max_size=3),
        starts=st.lists(U32, max_size=3),
        sizes=st.lists(st.integers(0, 3) | U32, max_size=3),
        tokens=st.lists(st.integers(0, VOCAB) | U32, max_size=6),
    )
)
@settings(deadline=None, max_examples=300)
def test_any_commit_arrays_are_good_or_refused(batch: peer_pb2.CommitBatch) -> None:
    try:
        commits = unpack_commits(batch, VOCAB)
    except StreamProtocolError:
        return
    assert len(commits) == len(batch.sequence_ids)
    assert sum(len(commit.tokens) for commit in commits) == len(batch.tokens)
    for commit in commits:
        assert commit.sequence_id > 0
        assert commit.start >= 1
        assert commit.tokens
        assert all(0 <= token < VOCAB for token in commit.tokens)


def test_commit_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = pack_commits([Commit(1, 0, 5, (1, 2, 3)), Commit(2, 0, 5, (1,))])
    for limit, most in (("MAX_ENTRIES", 2), ("MAX_COMMIT_TOKENS", 4), ("MAX_POSITIONS", 8)):
        monkeypatch.setattr(frames, limit, most - 1)
        with pytest.raises(StreamProtocolError):
            unpack_commits(batch, VOCAB)
        monkeypatch.setattr(frames, limit, most)
    assert len(unpack_commits(batch, VOCAB)) == 2
