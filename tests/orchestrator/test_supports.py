"""Distributions of drafted tokens in batches that the conductor joins or thins out: what arrives is what was packed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.draft_batches import join_drafts
from orchestrator.supports import copy_supports, has_supports, supports_agree
from paceline.drafts import DraftEntry, DrawRule, SiblingDraws
from paceline.sampling.distribution import DraftDistribution
from paceline.v1 import peer_pb2
from services.runtime.frames import pack_drafts, unpack_drafts

NAMES = ("draws", "num_supports", "support_sizes", "support_tokens", "support_weights", "support_confidences")
PLAIN = DraftEntry(3, (1, 2), (-1, 0), (-0.5, -1.0))


@st.composite
def drawn(draw: st.DrawFn) -> DraftEntry:
    """A chain of one to three drawn tokens."""
    tokens, draws = [], []
    for _ in range(draw(st.integers(1, 3))):
        ids = draw(st.lists(st.integers(0, 49), min_size=1, max_size=4, unique=True))
        weights = draw(st.lists(st.integers(1, 65535), min_size=len(ids), max_size=len(ids)))
        dist = DraftDistribution.of_weights(torch.tensor(ids), torch.tensor(weights))
        tokens.append(ids[0])
        sure = draw(st.none() | st.floats(0, 1))
        draws.append(SiblingDraws((ids[0],), DrawRule.WITHOUT_REPLACEMENT, dist, sure))
    return DraftEntry.chain(9, tokens, [-0.5] * len(tokens), draft_dists=draws)


ENTRIES = st.lists(drawn() | st.just(PLAIN), min_size=1, max_size=4)


def packed(entries: list[DraftEntry], first_id: int = 1) -> peer_pb2.DraftBatch:
    return pack_drafts([(first_id + i, 0, entry) for i, entry in enumerate(entries)])


def arrays(batch: peer_pb2.DraftBatch) -> list[object]:
    return [
        bytes(value) if isinstance(value, bytes) else list(value)
        for value in (getattr(batch, n) for n in NAMES)
    ]


@given(ENTRIES, st.data())
@settings(deadline=None)
def test_entries_that_stay_keep_what_they_were_drawn_from(
    entries: list[DraftEntry], data: st.DataObject
) -> None:
    kept = sorted(data.draw(st.sets(st.sampled_from(range(len(entries))))))
    whole = packed(entries)
    assert supports_agree(whole)
    if not has_supports(whole):
        return
    copied = peer_pb2.DraftBatch()
    copy_supports(whole, kept, copied)
    assert [len(copied.draws), len(copied.num_supports)] == [len(kept)] * 2
    alone = packed([entries[i] for i in kept])
    if has_supports(alone):
        assert arrays(copied) == arrays(alone)


@given(ENTRIES, ENTRIES)
@settings(deadline=None)
def test_joined_batches_are_the_batch_of_all_entries(one: list[DraftEntry], two: list[DraftEntry]) -> None:
    batch, more = packed(one), packed(two, 1 + len(one))
    before = more.SerializeToString()
    join_drafts(batch, more)
    assert more.SerializeToString() == before
    assert batch == packed([*one, *two])
    assert unpack_drafts(batch, 50)[1] == 0


def test_batches_of_drafters_that_send_no_confidences_join_others() -> None:
    dist = DraftDistribution.of_weights(torch.tensor([4]), torch.tensor([1]))
    one, two = (
        packed(
            [
                DraftEntry.chain(
                    3, [4], draft_dists=[SiblingDraws((4,), DrawRule.WITHOUT_REPLACEMENT, dist, sure)]
                )
            ]
        )
        for sure in (0.5, None)
    )
    assert not two.support_confidences
    assert supports_agree(two)
    join_drafts(one, two)
    assert supports_agree(one)
    assert list(one.support_confidences) == [500, 0]


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: batch.num_supports.pop(),
        lambda batch: batch.draws.append(1),
        lambda batch: batch.support_sizes.append(1),
        lambda batch: batch.support_tokens.append(1),
        lambda batch: batch.support_confidences.append(1),
        lambda batch: setattr(batch, "support_weights", batch.support_weights[:-1]),
    ],
)
def test_arrays_that_disagree_are_noticed(change: Callable[[peer_pb2.DraftBatch], object]) -> None:
    dist = DraftDistribution.of_weights(torch.tensor([4]), torch.tensor([1]))
    draws = SiblingDraws((4,), DrawRule.WITHOUT_REPLACEMENT, dist, 0.5)
    batch = packed([DraftEntry.chain(3, [4], draft_dists=[draws])])
    assert supports_agree(batch)
    change(batch)
    assert not supports_agree(batch)
    bare = peer_pb2.DraftBatch(support_weights=b"ab")
    assert not supports_agree(bare)
