"""What drafted tokens were drawn from, on the wire: round trips, and nothing that gets past the checks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drafts import DraftEntry, DrawRule, SiblingDraws
from paceline.sampling.distribution import DraftDistribution
from paceline.sampling.draws import draw_siblings
from paceline.v1 import peer_pb2
from services.runtime.frames import pack_drafts, unpack_drafts

VOCAB = 50
PLAIN = DraftEntry(start=3, tokens=(1, 2), parents=(-1, 0), log_probs=(-0.5, -1.0))


@st.composite
def distributions(draw: st.DrawFn) -> DraftDistribution:
    ids = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6, unique=True))
    weights = draw(st.lists(st.integers(1, 65535), min_size=len(ids), max_size=len(ids)))
    return DraftDistribution.of_weights(torch.tensor(ids), torch.tensor(weights))


@st.composite
def drawn(draw: st.DrawFn) -> DraftEntry:
    """Two positions of one to three siblings each; the second goes on from the first's first."""
    rule = draw(st.sampled_from([DrawRule.WITH_REPLACEMENT, DrawRule.WITHOUT_REPLACEMENT]))
    tokens, parents, draws, parent = [], [], [], -1
    for _ in range(2):
        noise = draw(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=3))
        siblings = draw_siblings(draw(distributions()), rule, noise)
        siblings = replace(siblings, confidence=draw(st.none() | st.floats(0, 1)))
        first = len(tokens)
        for token in siblings.tokens:
            tokens.append(token)
            parents.append(parent)
            draws.append(siblings)
        parent = first
    return DraftEntry(9, tuple(tokens), tuple(parents), draft_dists=tuple(draws))


def dist_of(draws: SiblingDraws | None) -> DraftDistribution:
    assert draws is not None
    assert isinstance(draws.distribution, DraftDistribution)
    return draws.distribution


@given(st.lists(drawn() | st.just(PLAIN), min_size=1, max_size=4))
@settings(deadline=None)
def test_what_arrives_is_what_was_drawn_from(entries: list[DraftEntry]) -> None:
    wire = pack_drafts([(i + 1, 0, entry) for i, entry in enumerate(entries)]).SerializeToString()
    unpacked, num_malformed = unpack_drafts(peer_pb2.DraftBatch.FromString(wire), VOCAB)
    assert num_malformed == 0
    for sent, (_, _, received) in zip(entries, unpacked, strict=True):
        assert (received.tokens, received.parents) == (sent.tokens, sent.parents)
        assert (received.draft_dists is None) == (sent.draft_dists is None)
        if sent.draft_dists is None or received.draft_dists is None:
            continue
        for one, other in zip(sent.draft_dists, received.draft_dists, strict=True):
            assert one is not None
            assert other is not None
            assert (one.tokens, one.rule) == (other.tokens, other.rule)
            assert (one.confidence is None) == (other.confidence is None)
            assert one.confidence is None or other.confidence == pytest.approx(one.confidence, abs=1e-3)
            assert torch.equal(dist_of(one).token_ids, dist_of(other).token_ids)
            assert torch.equal(dist_of(one).probs, dist_of(other).probs)  # to the last bit
        for i, parent in enumerate(received.parents):  # siblings share one object
            for j, other_parent in enumerate(received.parents):
                assert (received.draft_dists[i] is received.draft_dists[j]) == (parent == other_parent)


def test_a_batch_without_draws_carries_nothing_of_them() -> None:
    batch = pack_drafts([(1, 0, PLAIN)])
    for name in (
        "draws",
        "num_supports",
        "support_sizes",
        "support_tokens",
        "support_weights",
        "support_confidences",
    ):
        assert not getattr(batch, name)


def good_batch() -> peer_pb2.DraftBatch:
    """A plain entry, a drawn one of two positions, a plain one."""
    dist = DraftDistribution.of_weights(torch.tensor([4, 5, 6]), torch.tensor([9, 2, 1]))
    top = SiblingDraws((4, 5), DrawRule.WITHOUT_REPLACEMENT, dist, 0.75)
    low = SiblingDraws((6,), DrawRule.WITHOUT_REPLACEMENT, dist)
    entry = DraftEntry(3, (4, 5, 6), (-1, -1, 0), draft_dists=(top, top, low))
    return pack_drafts([(1, 0, PLAIN), (2, 0, entry), (3, 0, PLAIN)])


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("draws", 1, 7),  # an unknown rule
        ("draws", 1, 0),  # not drawn, with distributions
        ("draws", 0, 1),  # drawn, without
        ("support_tokens", 1, VOCAB),
        ("support_tokens", 1, 2**32 - 1),
        ("support_tokens", 1, 4),  # twice
        ("tokens", 3, 4),  # the same sibling twice, without replacement
        ("tokens", 2, 7),  # not in its support
        ("support_confidences", 1, 1001),
    ],
)
def test_one_bad_entry_is_dropped_and_its_neighbours_live(name: str, place: int, value: int) -> None:
    batch = good_batch()
    assert [i for i, _, _ in unpack_drafts(batch, VOCAB)[0]] == [1, 2, 3]
    getattr(batch, name)[place] = value
    unpacked, num_malformed = unpack_drafts(batch, VOCAB)
    bad = 1 if (name, place) == ("draws", 0) else 2
    assert [i for i, _, _ in unpacked] == [i for i in (1, 2, 3) if i != bad]
    assert num_malformed == (2 if bad == 1 else 3)


def test_a_drafter_that_sends_no_confidences_says_nothing() -> None:
    batch = good_batch()
    batch.ClearField("support_confidences")
    (_, (_, _, entry), _), _ = unpack_drafts(batch, VOCAB)
    assert entry.draft_dists is not None
    assert all(draws is not None and draws.confidence is None for draws in entry.draft_dists)


def test_a_weight_of_zero_is_refused() -> None:
    batch = good_batch()
    batch.support_weights = b"\0\0" + batch.support_weights[2:]
    assert [i for i, _, _ in unpack_drafts(batch, VOCAB)[0]] == [1, 3]


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: batch.num_supports.pop(),
        lambda batch: batch.draws.pop(),
        lambda batch: batch.support_sizes.append(1),
        lambda batch: batch.support_tokens.append(1),
        lambda batch: batch.support_confidences.pop(),
        lambda batch: setattr(batch, "support_weights", batch.support_weights + b"\1"),
        lambda batch: setattr(batch, "support_weights", batch.support_weights[:-2]),
        lambda batch: batch.support_sizes.__setitem__(0, 2**32 - 1),
        lambda batch: batch.num_supports.__setitem__(1, 2**32 - 1),
    ],
)
def test_arrays_that_disagree_cost_the_batch(change) -> None:
    batch = good_batch()
    change(batch)
    assert unpack_drafts(batch, VOCAB) == ([], 7)


def test_a_support_too_large_is_refused() -> None:
    ids = torch.arange(300)
    dist = DraftDistribution.of_weights(ids, torch.ones(300, dtype=torch.int64))
    draws = SiblingDraws((7,), DrawRule.WITHOUT_REPLACEMENT, dist)
    batch = pack_drafts([(1, 0, DraftEntry(3, (7,), (-1,), draft_dists=(draws,)))])
    assert unpack_drafts(batch, 1000) == ([], 1)


def test_a_distribution_that_was_not_rounded_is_not_sent() -> None:
    draws = SiblingDraws((0,), DrawRule.WITHOUT_REPLACEMENT, DraftDistribution.dense(torch.tensor([1.0])))
    with pytest.raises(ValueError, match="whole numbers"):
        pack_drafts([(1, 0, DraftEntry(3, (0,), (-1,), draft_dists=(draws,)))])


@given(position=st.integers(0, 10_000), byte=st.integers(0, 255))
@settings(deadline=None, max_examples=300)
def test_a_changed_byte_yields_only_distributions(position: int, byte: int) -> None:
    wire = bytearray(good_batch().SerializeToString())
    wire[position % len(wire)] = byte
    batch = peer_pb2.DraftBatch()
    try:
        batch.ParseFromString(bytes(wire))
    except Exception:  # protobuf's own refusal
        return
    for _, _, entry in unpack_drafts(batch, VOCAB)[0]:
        for token, draws in zip(entry.tokens, entry.draft_dists or (), strict=False):
            dist = dist_of(draws)
            assert dist.prob(token) > 0
            assert float(dist.probs.sum()) == pytest.approx(1)
            assert 0 <= int(dist.token_ids.min()) <= int(dist.token_ids.max()) < VOCAB
            assert len(dist.token_ids.unique()) == len(dist.token_ids)
