"""Step reports: unpacked into one row per commit, and refused where they contradict themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from orchestrator.step_report import acceptance_by_commit, commit_rows
from paceline.contract.errors import StreamProtocolError
from paceline.v1 import peer_pb2, sampling_pb2, target_pb2


def report() -> target_pb2.StepReport:
    """Two commits: one continues, one ends."""
    return target_pb2.StepReport(
        commits=peer_pb2.CommitBatch(
            sequence_ids=[7, 9], epochs=[1, 0], starts=[10, 20], sizes=[3, 1], tokens=[1, 2, 3, 4]
        ),
        num_draft_tokens=[5, 0],
        draft_depths=[4, 0],
        num_accepted_tokens=[2, 0],
        drafter_depths=[3, 0],
        num_accepted_of_drafter=[1, 0],
        finish_reasons=[sampling_pb2.FINISH_REASON_UNSPECIFIED, sampling_pb2.FINISH_REASON_STOP],
        cache_hits=[1, 0],
        num_acceptance_samples=[2, 0],
        acceptance_samples=[8, 9],
    )


def test_each_commit_becomes_a_row() -> None:
    one, other = commit_rows(report())
    assert (one.sequence_id, one.epoch, one.start, one.tokens) == (7, 1, 10, [1, 2, 3])
    assert (one.num_draft_tokens, one.draft_depth, one.num_accepted_tokens) == (5, 4, 2)
    assert (one.drafter_depth, one.num_accepted_of_drafter) == (3, 1)
    assert (one.finish_reason, one.is_cache_hit, one.acceptance_samples) == (0, True, [8, 9])
    assert (other.sequence_id, other.epoch, other.start, other.tokens) == (9, 0, 20, [4])
    assert (other.finish_reason, other.is_cache_hit) == (sampling_pb2.FINISH_REASON_STOP, False)
    assert other.acceptance_samples == []


def test_a_verifier_without_ngram_proposals_may_leave_the_drafters_part_out() -> None:
    step = report()
    for field in ("drafter_depths", "num_accepted_of_drafter", "cache_hits"):
        step.ClearField(field)
    one, _ = commit_rows(step)
    assert (one.drafter_depth, one.num_accepted_of_drafter, one.is_cache_hit) == (4, 2, False)


def test_no_more_is_accepted_than_was_proposed() -> None:
    step = report()
    step.num_accepted_tokens[0], step.num_accepted_of_drafter[0] = 99, 99
    one, _ = commit_rows(step)
    assert (one.num_accepted_tokens, one.num_accepted_of_drafter) == (4, 3)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda step: step.draft_depths.append(1), "differ in length"),
        (lambda step: step.commits.epochs.pop(), "differ in length"),
        (lambda step: step.drafter_depths.pop(), "differ in length"),
        (lambda step: step.commits.tokens.append(5), "do not add up"),
        (lambda step: step.acceptance_samples.append(5), "do not add up"),
        (lambda step: step.acceptance_samples.__setitem__(0, 1 << 23), "23 bits"),
        (lambda step: step.finish_reasons.__setitem__(0, 99), "finish reason"),
    ],
)
def test_a_report_that_contradicts_itself_is_refused(
    change: Callable[[target_pb2.StepReport], object], match: str
) -> None:
    step = report()
    change(step)
    with pytest.raises(StreamProtocolError, match=match):
        commit_rows(step)


def test_acceptance_samples_of_a_step_are_checked() -> None:
    commits = peer_pb2.CommitBatch(sequence_ids=[1, 2])
    good = target_pb2.StepReport(commits=commits, num_acceptance_samples=[2, 0], acceptance_samples=[1, 2])
    assert acceptance_by_commit(good) == [[1, 2], []]
    assert acceptance_by_commit(target_pb2.StepReport(commits=commits)) == [[], []]
    for bad in (
        target_pb2.StepReport(commits=commits, num_acceptance_samples=[2], acceptance_samples=[1, 2]),
        target_pb2.StepReport(commits=commits, num_acceptance_samples=[1, 0], acceptance_samples=[1, 2]),
        target_pb2.StepReport(commits=commits, num_acceptance_samples=[1, 0], acceptance_samples=[1 << 23]),
    ):
        with pytest.raises(StreamProtocolError):
            acceptance_by_commit(bad)
