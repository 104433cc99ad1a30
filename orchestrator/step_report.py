"""A verifier's step report, unpacked into one row per commit.

Responsible for: every check of a report that needs no sequence: arrays of equal length, sizes that add up, finish
reasons that exist, acceptance samples within their bits. Deliberately does not know: which sequences are running.
Called by: orchestrator.step_handler.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

from paceline.contract.errors import StreamProtocolError
from paceline.v1 import sampling_pb2, target_pb2

FINISH_REASONS = frozenset(sampling_pb2.FinishReason.values())
ACCEPTANCE_SAMPLE_BITS = 23  # position 6, own probability 8, calibrated probability 8, accepted 1


class CommitRow(NamedTuple):
    """One sequence's part of a step report.

    Attributes:
        sequence_id: the verifier's id.
        epoch: the verifier's epoch.
        start: length of the text before the commit.
        tokens: the committed tokens.
        num_draft_tokens: draft tokens verified.
        draft_depth: depth of the verified tree.
        num_accepted_tokens: draft tokens accepted, at most `draft_depth`.
        drafter_depth: depth of that part of the tree that a drafter proposed; the rest is an n-gram proposal.
        num_accepted_of_drafter: accepted tokens that a drafter proposed, at most `drafter_depth`.
        finish_reason: why the sequence ended; unspecified (0) while it continues.
        is_cache_hit: the speculation cache already holds a draft that continues the committed text.
        acceptance_samples: what became of the draft tokens, packed as in paceline.v1.StepReport.
    """

    sequence_id: int
    epoch: int
    start: int
    tokens: list[int]
    num_draft_tokens: int
    draft_depth: int
    num_accepted_tokens: int
    drafter_depth: int
    num_accepted_of_drafter: int
    finish_reason: sampling_pb2.FinishReason
    is_cache_hit: bool
    acceptance_samples: Sequence[int]


def commit_rows(step: target_pb2.StepReport) -> list[CommitRow]:
    """The commits of a report, in its order.

    Raises:
        StreamProtocolError: the arrays disagree, or a number is out of its range.
    """
    commits = step.commits
    sequence_ids, sizes, tokens = commits.sequence_ids, commits.sizes, list(commits.tokens)
    depths, accepted = step.draft_depths, step.num_accepted_tokens
    # A verifier without n-gram proposals leaves these two out: all of its trees are a drafter's.
    drafter_depths = step.drafter_depths or depths
    accepted_of_drafter = step.num_accepted_of_drafter or accepted
    columns = (
        sequence_ids,
        commits.epochs,
        commits.starts,
        sizes,
        step.num_draft_tokens,
        depths,
        accepted,
        drafter_depths,
        accepted_of_drafter,
        step.finish_reasons,
    )
    if len({len(column) for column in columns}) > 1:
        raise StreamProtocolError("the arrays of a step report differ in length")
    if sum(sizes) != len(tokens):
        raise StreamProtocolError("the sizes of a step report's commits do not add up to its tokens")
    if not FINISH_REASONS.issuperset(step.finish_reasons):
        raise StreamProtocolError("a step report carries an unknown finish reason")
    has_cache_hits = len(step.cache_hits) == len(sequence_ids)
    fields = zip(
        sequence_ids,
        commits.epochs,
        commits.starts,
        _spans(tokens, sizes),
        step.num_draft_tokens,
        depths,
        map(min, accepted, depths),
        drafter_depths,
        map(min, accepted_of_drafter, drafter_depths),
        step.finish_reasons,
        map(bool, step.cache_hits) if has_cache_hits else repeat(False, len(sequence_ids)),
        acceptance_by_commit(step),
        strict=True,
    )
    return list(map(CommitRow._make, fields))


def acceptance_by_commit(step: target_pb2.StepReport) -> list[list[int]]:
    """The packed acceptance samples of each commit; empty lists for a verifier that sends none.

    Raises:
        StreamProtocolError: the arrays disagree, or a sample has more bits than a sample can have.
    """
    num_commits, sizes = len(step.commits.sequence_ids), step.num_acceptance_samples
    if not sizes and not step.acceptance_samples:
        return [[]] * num_commits
    if len(sizes) != num_commits or sum(sizes) != len(step.acceptance_samples):
        raise StreamProtocolError("the acceptance samples of a step report do not add up")
    samples = list(step.acceptance_samples)
    if samples and max(samples) >> ACCEPTANCE_SAMPLE_BITS:
        raise StreamProtocolError(
            f"a step report carries an acceptance sample of more than {ACCEPTANCE_SAMPLE_BITS} bits"
        )
    return list(_spans(samples, sizes))


def _spans(values: list[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    offset = 0
    for size in sizes:
        yield values[offset : offset + size]
        offset += size
