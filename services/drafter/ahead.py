"""Drafting ahead: what a drafter does while the target verifies the draft that it sent.

Responsible for: filling the speculation cache (paths for the likely verification outcomes, arXiv 2603.03251), or making
the draft longer; the plan and the request's mode decide which. Either goes a little at a time and stops as soon as
something newer has come in. What was made by then is sent, and a target that has moved on takes what still fits.

Deliberately does not know: where commits come from, what becomes of the paths. Used by services.drafter.loop, on its
thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import structlog

from paceline.contract.limits import MAX_DRAFT_NODES
from paceline.methods.drafter import Drafter, OutcomeRequest, may_rank
from paceline.v1 import drafter_pb2
from services.drafter.batches import DraftBatches, DraftRow, pack
from services.drafter.sequence import DraftSequence
from services.drafter.session import DraftSession
from services.runtime import metrics

AHEAD_STEP = 2
"""Tokens drafted ahead between two looks at the inbox."""

FLUSH_S = 0.002
"""After this long, seconds, what was made is sent before more is: a target that does not wait can verify it at once."""

log = structlog.get_logger()


class DraftingAhead:
    """Drafts for sequences whose last draft has been answered.

    Args:
        drafter: also used by `batches`.
        batches: calls the drafter for longer drafts.
        model_name: label of the metrics.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        drafter: Drafter,
        batches: DraftBatches,
        model_name: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._drafter = drafter
        self._batches = batches
        self._clock = clock
        self._num_ahead = metrics.DRAFTED_TOKENS.labels(model_name, drafter.method, "ahead")
        self._num_cached = metrics.DRAFTED_TOKENS.labels(model_name, drafter.method, "outcome")

    def draft(
        self, idle: Sequence[DraftSequence], may_continue: Callable[[], bool]
    ) -> dict[DraftSession, drafter_pb2.DraftResponse]:
        """Drafts ahead; one answer per session that got anything.

        Args:
            idle: sequences without a pending draft.
            may_continue: asked between two passes; False when something newer has come in.
        """
        current = [
            sequence
            for sequence in idle
            if sequence.session.policy.draft_length
            and sequence.session.policy.draft_ahead
            and sequence.drafted_length == sequence.length
        ]
        started_at = self._clock()
        rows = self._fill_cache([s for s in current if uses_cache(s)], may_continue)
        rows += self._lengthen([s for s in current if not uses_cache(s)], may_continue)
        answers = {row.sequence.session: drafter_pb2.DraftResponse() for row in rows}
        pack(answers, rows, self._clock() - started_at, num_steps=0)
        return answers

    def _fill_cache(
        self, sequences: Sequence[DraftSequence], may_continue: Callable[[], bool]
    ) -> list[DraftRow]:
        """Once per draft: paths for the likely verification outcomes of this drafter's partition.

        A call that was stopped for another session's sake is made again when that session has been served.
        """
        rows = [
            DraftRow(sequence, self._batches.num_tokens(sequence, sequence.session.policy.draft_ahead))
            for sequence in sequences
            if sequence.cached_length != sequence.length
        ]
        if not rows or not may_continue():
            return []
        was_stopped = False

        def goes_on() -> bool:
            nonlocal was_stopped
            was_stopped = not may_continue()
            return not was_stopped

        try:
            entries = self._drafter.draft_outcomes([_outcome_request(row) for row in rows], goes_on)
            for row, entry in zip(rows, entries, strict=True):
                row.entry = entry
        except Exception:  # the draft from the next commit will find the sequence that is at fault
            log.exception("drafting ahead for outcomes failed", num_sequences=len(rows))
            was_stopped = False
            return []
        finally:
            if not was_stopped:
                for row in rows:
                    row.sequence.cached_length = row.sequence.length
        made = [row for row in rows if row.entry is not None]
        self._num_cached.inc(sum(len(row.entry.tokens) for row in made if row.entry is not None))
        return made

    def _lengthen(
        self, sequences: Sequence[DraftSequence], may_continue: Callable[[], bool]
    ) -> list[DraftRow]:
        """Longer chains from the same committed length, a few tokens at a time."""
        limits = {
            sequence: self._batches.num_tokens(
                sequence, sequence.session.policy.draft_length + sequence.session.policy.draft_ahead
            )
            for sequence in sequences
        }
        longest: dict[DraftSequence, DraftRow] = {}
        draft_s = 0.0
        while True:
            rows = [
                DraftRow(sequence, min(sequence.num_drafted + AHEAD_STEP, limit))
                for sequence, limit in limits.items()
                if sequence.num_drafted < limit
            ]
            if not rows or draft_s >= FLUSH_S or not may_continue():
                return list(longest.values())
            draft_s += self._batches.run(rows)
            for row in rows:
                sequence = row.sequence
                if row.entry is not None and len(row.entry.tokens) > sequence.num_drafted:
                    longest[sequence] = row
                    self._num_ahead.inc(len(row.entry.tokens) - sequence.num_drafted)
                sequence.num_drafted = (
                    row.num_tokens
                )  # also where the drafter made nothing: it is not asked again


def uses_cache(sequence: DraftSequence) -> bool:
    """Whether drafting ahead fills the speculation cache; otherwise it makes the draft longer."""
    return sequence.session.policy.num_outcomes > 0 and may_rank(sequence.sampling)


def _outcome_request(row: DraftRow) -> OutcomeRequest:
    sequence = row.sequence
    return OutcomeRequest(
        sequence_id=sequence.local_id,
        num_tokens=row.num_tokens,
        max_outcomes=sequence.session.policy.num_outcomes,
        max_nodes=MAX_DRAFT_NODES,
        sampling=sequence.sampling,
        partition=sequence.partition,
        num_partitions=sequence.num_partitions,
    )
