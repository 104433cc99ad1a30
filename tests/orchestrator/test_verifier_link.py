"""Frames to the verifier: joined drafts, and the profile that comes with a hello."""

from __future__ import annotations

from orchestrator.draft_batches import join_drafts
from orchestrator.settings import OrchestratorSettings
from orchestrator.verifier_link import VerifierLink
from paceline.v1 import peer_pb2, target_pb2


def draft_batch(sequence_id: int, tokens: list[int], log_probs: list[float]) -> peer_pb2.DraftBatch:
    return peer_pb2.DraftBatch(
        sequence_ids=[sequence_id],
        epochs=[0],
        starts=[3],
        sizes=[len(tokens)],
        tokens=tokens,
        parents=range(-1, len(tokens) - 1),
        log_probs=log_probs,
    )


def test_merged_drafts_carry_log_probs_for_all_tokens_or_for_none() -> None:
    both = draft_batch(1, [4], [-0.5])
    join_drafts(both, draft_batch(2, [5, 6], [-1.0, -2.0]))
    assert list(both.sizes) == [1, 2]
    assert list(both.tokens) == [4, 5, 6]
    assert list(both.log_probs) == [-0.5, -1.0, -2.0]
    join_drafts(both, draft_batch(3, [7], []))
    assert list(both.tokens) == [4, 5, 6, 7]
    assert not both.log_probs
    join_drafts(both, more := draft_batch(4, [8], [-0.5]))
    assert not both.log_probs
    assert list(more.log_probs) == [-0.5]


def test_a_hello_brings_the_profile_and_only_a_fresh_one_counts() -> None:
    link = VerifierLink(
        "h:1",
        client_id="c",
        timing=OrchestratorSettings(verifiers=("h:1",)).timing(5.0),
        tls=None,
        clock=lambda: 0.0,
        num_running=lambda: 0,
    )
    info = peer_pb2.PeerInfo(instance_id="v")
    frame = target_pb2.VerifyResponse(hello=info, profile=target_pb2.StepProfile(num_rows=[1]))
    assert link.hello_of(frame) == info
    assert link.profile is not None
    assert list(link.profile.num_rows) == [1]
    link.profile = None
    assert link.hello_of(target_pb2.VerifyResponse(hello=info)) == info
    assert link.profile is None
