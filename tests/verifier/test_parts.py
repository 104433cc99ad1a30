"""The verifier's parts on their own: node budget, cutting at limits, the feature log."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from paceline.contract.errors import InvalidRequestError
from paceline.contract.policy import StepPolicy
from paceline.drafts import DraftEntry, DrawRule, SiblingDraws
from paceline.sampling.params import SamplingParams, VerifyMode
from paceline.v1 import peer_pb2, target_pb2
from services.runtime import tensors
from services.verifier.feature_hub import FeatureHub, Subscriber
from services.verifier.sequence import TargetSequence
from services.verifier.sequence_state import Finish
from services.verifier.session import VerifySession
from services.verifier.specs import SequenceSpec


def sequence(
    max_new_tokens: int = 10,
    max_positions: int = 100,
    max_draft_nodes: int = 8,
    mode: VerifyMode = VerifyMode.GREEDY,
) -> TargetSequence:
    loop = asyncio.new_event_loop()
    loop.close()
    spec = SequenceSpec(
        1,
        0,
        (1, 2, 3),
        SamplingParams(temperature=float(mode is not VerifyMode.GREEDY), mode=mode),
        max_new_tokens,
        frozenset({9}),
        max_draft_nodes,
    )
    return TargetSequence(1, spec, VerifySession(loop, "test"), max_positions, 50)


def test_commit_is_cut_at_the_stop_token() -> None:
    running = sequence()
    assert running.commit([4, 9, 5])[:2] == ([4, 9], Finish.STOP)
    assert running.committed == [1, 2, 3, 4, 9]


def test_commit_is_cut_at_the_token_limit_and_at_the_last_position() -> None:
    assert sequence(max_new_tokens=2).commit([4, 5, 6])[:2] == ([4, 5], Finish.LENGTH)
    assert sequence(max_positions=5).commit([4, 5, 6])[:2] == ([4, 5], Finish.LENGTH)


def test_the_end_drops_what_was_not_accepted() -> None:
    """The metric of dropped draft nodes counts no accepted token, in a sequence's last step as in any other."""
    for max_new_tokens in (2, 10):
        subject = sequence(max_new_tokens=max_new_tokens)
        subject.add_draft(DraftEntry.chain(subject.committed_length, [4, 9, 8]))
        assert subject.commit([4, 5])[2] == 2


def test_no_draft_reaches_past_what_may_be_committed() -> None:
    running = sequence(max_new_tokens=3)
    running.trie.add(DraftEntry.chain(3, (4, 5, 6, 7)))
    assert running.choose_tree(8).tokens == (4, 5)
    assert len(sequence(max_draft_nodes=0).choose_tree(8)) == 0


SIBLING_CHAIN = DraftEntry(3, (4, 5, 6, 7), (-1, -1, 0, 0), (-0.1, -3.0, -9.0, -0.1))


def drawn(entry: DraftEntry) -> DraftEntry:
    """The entry as if its siblings had been drawn."""
    groups = {
        parent: SiblingDraws(
            tuple(t for t, p in zip(entry.tokens, entry.parents, strict=True) if p == parent),
            DrawRule.WITHOUT_REPLACEMENT,
            None,
        )
        for parent in entry.parents
    }
    return replace(entry, draft_dists=tuple(groups[parent] for parent in entry.parents))


def test_each_mode_verifies_what_it_may_choose() -> None:
    """The likeliest nodes where values may count, the first draws where they may not, a path for blocks."""
    chosen = {}
    for mode in VerifyMode:
        running = sequence(mode=mode)
        running.add_draft(
            drawn(SIBLING_CHAIN) if mode in (VerifyMode.REJECTION, VerifyMode.BLOCK) else SIBLING_CHAIN
        )
        chosen[mode] = running.choose_tree(2).tokens
    assert chosen == {
        VerifyMode.GREEDY: (4, 7),
        VerifyMode.COUPLED: (4, 7),
        VerifyMode.TYPICAL: (4, 7),
        VerifyMode.REJECTION: (4, 5),  # the second draw beside the first, before anything below it
        VerifyMode.BLOCK: (4, 6),
    }
    running = sequence(mode=VerifyMode.REJECTION)
    running.add_draft(SIBLING_CHAIN)  # not drawn: as likely as they look
    assert running.choose_tree(2).tokens == (4, 7)


@pytest.mark.parametrize("mode", [VerifyMode.REJECTION, VerifyMode.BLOCK])
def test_a_block_that_was_not_kept_whole_uses_up_its_draws(mode: VerifyMode) -> None:
    """What was drawn from the same numbers as a refused block is not verified, however well it fits the text."""
    running = sequence(mode=mode)
    running.add_draft(drawn(DraftEntry.chain(3, [4, 5, 6])))
    running.commit([4, 5, 6, 7], is_whole_draft=True)
    running.add_draft(drawn(DraftEntry.chain(3, [4, 5, 6, 7, 8])))  # late, and still true
    assert running.choose_tree(8).tokens == (8,)
    running.add_draft(drawn(DraftEntry.chain(7, [1, 2])))  # drawn from the same numbers by another drafter
    running.commit([1], is_whole_draft=False)
    assert running.choose_tree(8).tokens == ((2,) if mode is VerifyMode.REJECTION else ())
    running.add_draft(drawn(DraftEntry.chain(7, [1, 2])))
    assert running.choose_tree(8).tokens == ((2,) if mode is VerifyMode.REJECTION else ())
    running.add_draft(drawn(DraftEntry.chain(8, [3])))
    assert 3 in running.trie.select_best(8, 8).tokens


def test_policy_from_the_wire_is_checked() -> None:
    with pytest.raises(InvalidRequestError, match=r"policy\.wait_budget_us"):
        StepPolicy.from_proto(peer_pb2.StepPolicy(wait_budget_us=10**8))
    assert StepPolicy.from_proto(peer_pb2.StepPolicy(version=3)).max_prefill_tokens_per_step > 0


async def test_features_are_replayed_to_a_subscriber_that_comes_late() -> None:
    hub = FeatureHub(lambda rows: rows)
    rows = torch.arange(12, dtype=torch.float32).view(6, 2)
    hub.open(7)
    hub.append(7, 0, rows[:2])
    hub.attach(7, epoch=4, subscriber_id="d", start=0)
    hub.append(7, 2, rows[2:3], tokens=[8])
    subscriber = Subscriber(asyncio.get_running_loop(), "d")
    hub.subscribe(subscriber)
    hub.append(7, 3, rows[3:], tokens=[5, 6])
    chunks = [await subscriber.pop() for _ in range(2)]
    assert [(c.sequence_id, c.epoch, c.start) for c in chunks] == [(7, 4, 0), (7, 4, 3)]
    assert [list(c.tokens) for c in chunks] == [[], [5, 6]]  # what is replayed was committed long ago
    received = torch.cat([tensors.decode(c.features, 1 << 20) for c in chunks])
    assert torch.equal(received, rows)
    hub.close(7)
    hub.append(7, 0, rows)
    hub.attach(7, 4, "d", 0)
    subscriber.end()
    assert await subscriber.pop() is None


async def test_features_go_to_every_reader_of_a_sequence() -> None:
    hub, loop = FeatureHub(lambda rows: rows), asyncio.get_running_loop()
    rows = torch.arange(8, dtype=torch.float32).view(4, 2)
    hub.open(7)
    readers = [Subscriber(loop, name) for name in ("a", "b")]
    for reader in readers:
        hub.subscribe(reader)
    hub.attach(7, 1, "a", 0)
    hub.append(7, 0, rows[:2])
    hub.attach(7, 1, "b", 0)  # comes later, and gets what it missed
    hub.append(7, 2, rows[2:], tokens=[9])
    for reader in readers:
        chunks = [await reader.pop() for _ in range(2)]
        assert [(c.start, list(c.tokens)) for c in chunks] == [(0, []), (2, [9])]
    for number in range(20):  # no number of them grows without bound, and the newest are served
        hub.attach(7, 1, f"other {number}", 0)
    hub.append(7, 4, rows[:1])
    for reader in readers:
        reader.end()
        assert await reader.pop() is None


async def test_features_logged_while_paused_are_pushed_when_drafting_resumes() -> None:
    hub, loop = FeatureHub(lambda captured: captured[:, :2] + captured[:, 2:]), asyncio.get_running_loop()
    rows = torch.arange(20, dtype=torch.float32).view(10, 2)
    captured = torch.cat([rows - 1, torch.ones(10, 2)], dim=-1)
    hub.open(7)
    readers = [Subscriber(loop, name) for name in ("a", "b", "late")]
    for reader in readers[:2]:
        hub.subscribe(reader)
    hub.attach(7, 1, "a", 0)
    hub.append(7, 0, rows[:2])
    hub.pause(True)
    hub.append(7, 2, captured[2:3], tokens=[9], is_projected=False)
    hub.attach(7, 1, "b", 1)
    hub.attach(7, 1, "late", 0)
    hub.append(7, 3, captured[3:6], tokens=[8], is_projected=False)
    hub.subscribe(readers[2])
    hub.pause(False)
    hub.append(7, 6, rows[6:], tokens=[5])
    for reader, starts in zip(readers, ([0, 2, 6], [1, 6], [0, 6]), strict=True):
        chunks = [await reader.pop() for _ in starts]
        assert [c.start for c in chunks] == starts
        assert [list(c.tokens) for c in chunks] == [[]] * (len(starts) - 1) + [[5]]
        received = torch.cat([tensors.decode(c.features, 1 << 20) for c in chunks])
        assert torch.equal(received, rows[starts[0] :])
        reader.end()
        assert await reader.pop() is None


async def test_a_subscriber_that_does_not_read_is_cut_off() -> None:
    subscriber = Subscriber(asyncio.get_running_loop(), "d")
    for _ in range(8200):
        subscriber.push(target_pb2.StreamFeaturesResponse())
    await asyncio.sleep(0)
    assert subscriber.is_overrun
