"""What the conductor does with a step report.

Responsible for: the stages of a step, in this order. Commits go into the commit logs and are counted; they go to the
drafters first, so that the next drafts begin; the readers are woken second; measurements go to the scheduler last.
Deliberately does not know gRPC. Called by orchestrator.cycles; never awaits.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import structlog

from orchestrator.commit_log import CommitGapError
from orchestrator.counters import Counters
from orchestrator.draft_acceptance import drafter_label
from orchestrator.draft_dispatcher import DraftDispatcher
from orchestrator.log_probs import check_committed, new_log_probs, take_prompt_log_probs
from orchestrator.output_queue import Ending
from orchestrator.policy import PolicyInForce
from orchestrator.reports import Reports
from orchestrator.sequence_lifecycle import SequenceLifecycle
from orchestrator.sequences import ConductorSequences, Sequence
from orchestrator.step_report import CommitRow, commit_rows
from orchestrator.verifier_link import VerifierLink
from paceline.contract.errors import UnavailableError
from paceline.v1 import target_pb2

log = structlog.get_logger()


@dataclass(slots=True)
class SequenceCommit:
    """A commit on its way through the stages.

    Attributes:
        sequence: the sequence, in the epoch that the commit names.
        row: what the report says.
        log_probs: the log-probabilities that came with it, None without any.
        new_tokens: committed tokens that the commit log did not have yet; set once they are appended.
    """

    sequence: Sequence
    row: CommitRow
    log_probs: target_pb2.SequenceLogProbs | None
    new_tokens: Seq[int] = ()


class StepHandler:
    """Carries step reports to commit logs, drafters, readers and the scheduler."""

    def __init__(
        self,
        *,
        sequences: ConductorSequences,
        lifecycle: SequenceLifecycle,
        verifier: VerifierLink,
        dispatcher: DraftDispatcher,
        policy: PolicyInForce,
        reports: Reports,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._sequences = sequences
        self._lifecycle = lifecycle
        self._verifier = verifier
        self._dispatcher = dispatcher
        self._policy = policy
        self._reports = reports
        self._counters = counters
        self._clock = clock

    def handle(self, step: target_pb2.StepReport) -> None:
        """Runs one report through all stages.

        Raises:
            StreamProtocolError: the report contradicts itself or its requests; none of its tokens was taken.
        """
        rows = commit_rows(step)
        commits = self._match(rows, step)
        self._take_prompt_log_probs(step)
        self._counters.num_steps += 1
        self._counters.num_stale_commits += len(rows) - len(commits)
        commits, gaps = self._append(commits)
        reported_drafts = self._count(commits)
        self._forward(commits)
        self._deliver(commits)
        self._reopen(gaps)
        self._report(step, commits, reported_drafts)

    def _match(self, rows: list[CommitRow], step: target_pb2.StepReport) -> list[SequenceCommit]:
        """Finds each commit's sequence and checks its log-probabilities; drops commits of old epochs."""
        messages = {message.sequence_id: message for message in step.log_probs}
        vocab_size = self._vocab_size
        commits = []
        for row in rows:
            sequence = self._sequences.by_id(row.sequence_id)
            if sequence is not None and sequence.epoch == row.epoch:
                message = messages.get(row.sequence_id)
                check_committed(sequence, message, len(row.tokens), vocab_size)
                commits.append(SequenceCommit(sequence, row, message))
        return commits

    def _take_prompt_log_probs(self, step: target_pb2.StepReport) -> None:
        """Hands out the log-probabilities of prompts; a step may bring them without a commit."""
        for message in step.log_probs:
            sequence = self._sequences.by_id(message.sequence_id)
            if sequence is not None:
                take_prompt_log_probs(sequence, message, self._vocab_size)

    def _append(
        self, commits: list[SequenceCommit]
    ) -> tuple[list[SequenceCommit], list[tuple[Sequence, CommitGapError]]]:
        """Extends the commit logs; returns the commits that fit, and the sequences that lost tokens."""
        appended, gaps = [], []
        for commit in commits:
            try:
                commit.new_tokens = commit.sequence.commit_log.append(commit.row.start, commit.row.tokens)
            except CommitGapError as gap:
                gaps.append((commit.sequence, gap))
            else:
                appended.append(commit)
        return appended, gaps

    def _count(self, commits: list[SequenceCommit]) -> list[tuple[int, int]]:
        """Counts tokens and drafts.

        Returns:
            (depth, accepted tokens) of each draft that shows how well its drafter does: not n-gram proposals, and not
            drafts made without the features that the drafter reads, for which the planner has an estimate of its own.
        """
        counters, shown = self._counters, []
        for commit in commits:
            sequence, row, drafting = commit.sequence, commit.row, commit.sequence.drafting
            counters.num_committed_tokens += len(commit.new_tokens)
            sequence.stats.add(row.num_draft_tokens, row.draft_depth, row.num_accepted_tokens)
            if not sequence.stats.num_draft_tokens:
                drafting.no_draft_reason = self._lifecycle.no_draft_reason(sequence)
            if row.draft_depth:
                counters.num_draft_tokens += row.num_draft_tokens
                counters.num_accepted_tokens += row.num_accepted_tokens
            if row.drafter_depth and not drafting.has_featureless_hit:
                shown.append((row.drafter_depth, row.num_accepted_of_drafter))
            drafting.has_featureless_hit = (
                row.is_cache_hit and self._policy.step.num_outcomes > 0 and drafting.reads_features
            )
            if row.acceptance_samples and (drafter := self._drafter_of(sequence)):
                self._reports.acceptance.add(drafter, row.acceptance_samples)
        return shown

    def _forward(self, commits: list[SequenceCommit]) -> None:
        """Sends the new tokens to the drafters of the sequences that continue."""
        self._dispatcher.forward(
            [commit.sequence for commit in commits if commit.new_tokens and not commit.row.finish_reason]
        )

    def _deliver(self, commits: list[SequenceCommit]) -> None:
        """Puts the new tokens into the output queues and wakes the readers; ends what has finished."""
        now = self._clock()
        for commit in commits:
            sequence, new_tokens = commit.sequence, commit.new_tokens
            if new_tokens:
                known = new_log_probs(sequence, commit.log_probs, len(commit.row.tokens), len(new_tokens))
                sequence.output_queue.put(new_tokens, known)
                sequence.last_token_at = now
                if sequence.first_token_at is None:
                    sequence.first_token_at = now
            if commit.row.finish_reason:
                self._lifecycle.finish(sequence, Ending(commit.row.finish_reason))
            else:
                sequence.output_queue.wake()

    def _reopen(self, gaps: list[tuple[Sequence, CommitGapError]]) -> None:
        """Opens sequences that lost tokens at the verifier again, from the text that their commit logs hold."""
        for sequence, gap in gaps:
            log.warning("commit gap", request_id=sequence.request_id, error=str(gap))
            self._verifier.close(sequence.sequence_id)
            self._lifecycle.set_back(sequence, UnavailableError(str(gap)))
            self._lifecycle.reopen_if_due(sequence)

    def _report(
        self, step: target_pb2.StepReport, commits: list[SequenceCommit], drafts: list[tuple[int, int]]
    ) -> None:
        """Hands the measurements to the scheduler's samples."""
        self._reports.step(
            step,
            drafts,
            len(self._sequences),
            self._policy.step.draft_length,
            num_tokens=len(step.commits.tokens),
            may_draft=all(not commit.sequence.drafting.is_off for commit in commits),
        )

    @property
    def _vocab_size(self) -> int:
        return 0 if self._verifier.info is None else self._verifier.info.vocab_size

    def _drafter_of(self, sequence: Sequence) -> str:
        """The label of the drafter that drafts for a sequence; empty where none does any more."""
        attachment = next(iter(sequence.drafting.attachments.values()), None)
        if attachment is not None and attachment.link.info is not None:
            return drafter_label(attachment.link.info)
        info = self._verifier.info
        return drafter_label(info) if info is not None and info.method else ""
