"""Draft rounds: which sequences get a draft now, and what becomes of their pending drafts.

Responsible for: waiting a bounded time for features, and gathering sequences so that they are drafted in one batch.
Deliberately does not know where commits come from, nor drafting ahead (`ahead.py`). Used by services.drafter.loop, on
its thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.v1 import drafter_pb2
from services.drafter.batches import DraftBatches, DraftRow, pack
from services.drafter.sequence import DraftSequence
from services.drafter.session import DraftSession
from services.runtime import metrics


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """Bounds of the loop; times in seconds.

    Attributes:
        max_sequences: sequences held at once.
        max_positions: positions the drafter has.
        feature_wait_s: longest wait of a draft for features.
        feature_gather_s: wait of sequences that could get a draft for others of the same moment.
        feature_loss_s: features that are missing for longer are lost.
    """

    max_sequences: int = 256
    max_positions: int = 1 << 20
    feature_wait_s: float = 0.1
    feature_gather_s: float = 0.001
    feature_loss_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Round:
    """The choice of a round.

    Attributes:
        sequences: those that get a draft now.
        next_at: when to choose again for sequences that wait for features; None where none does.
    """

    sequences: Sequence[DraftSequence] = ()
    next_at: float | None = None


class DraftRounds:
    """Drafts for sequences whose commits have come in.

    Args:
        batches: calls the drafter.
        limits: bounds of the loop.
        method: the drafter's method, label of the metrics.
        model_name: label of the metrics.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        batches: DraftBatches,
        limits: RoundLimits,
        method: str,
        model_name: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._batches = batches
        self._limits = limits
        self._clock = clock
        self._queue_seconds = metrics.DRAFT_QUEUE_SECONDS.labels(model_name, method)
        self._num_drafted = metrics.DRAFTED_TOKENS.labels(model_name, method, "answer")

    def choose(self, pending: Sequence[DraftSequence], now: float, *, may_follow: bool = False) -> Round:
        """Chooses the sequences that get a draft now.

        A sequence is ready once its features are in. One that has waited too long gets a draft without them: many
        drafters can continue from states of their own. A drafter that cannot leaves its draft pending until features
        come.

        Args:
            pending: sequences with a pending draft.
            now: the time.
            may_follow: other sequences of the same step, which have no pending draft yet, are likely to come in.
        """
        ready: list[DraftSequence] = []
        expired: list[DraftSequence] = []
        waits: list[float] = []
        first_arrival = now
        for sequence in pending:
            assert sequence.pending is not None
            if sequence.has_features:
                ready.append(sequence)
                first_arrival = min(first_arrival, sequence.pending.arrived_at)
            elif sequence.pending.frame_id and now >= sequence.pending.expires_at:
                expired.append(sequence)
            elif sequence.pending.frame_id:
                waits.append(sequence.pending.expires_at)
        if expired:
            return Round(ready + expired)
        gathered_at = first_arrival + self._limits.feature_gather_s
        if ready and (waits or may_follow) and now < gathered_at:
            return Round(next_at=gathered_at)
        return Round(ready, min(waits, default=None))

    def draft(self, sequences: Sequence[DraftSequence]) -> dict[DraftSession, drafter_pb2.DraftResponse]:
        """Drafts once for all sequences of a round; one answer per session, empty where nothing was drafted."""
        if not sequences:
            return {}
        rows: list[DraftRow] = []
        waited_s = 0.0
        started_at = self._clock()
        for sequence in sequences:
            assert sequence.pending is not None
            self._queue_seconds.observe(max(started_at - sequence.pending.arrived_at, 0.0))
            num_tokens = self._batches.num_tokens(sequence, sequence.session.policy.draft_length)
            if num_tokens > 0:
                rows.append(DraftRow(sequence, num_tokens))
                waited_s += max(started_at - sequence.complete_at, 0.0)
            else:
                sequence.pending = None
        draft_s = self._batches.run(rows, may_branch=True)
        for row in rows:
            self._settle(row)
        # The drafters of other partitions draft only to find the outcomes that they draft ahead for.
        made = [row for row in rows if row.entry is not None and row.sequence.partition == 0]
        num_steps = max(row.num_tokens for row in rows) if made else 0
        answers = {sequence.session: drafter_pb2.DraftResponse() for sequence in sequences}
        pack(answers, made, draft_s, num_steps, waited_s / max(len(rows), 1))
        return answers

    def _settle(self, row: DraftRow) -> None:
        """Notes what became of a pending draft."""
        sequence = row.sequence
        if row.entry is not None:
            sequence.pending = None
            sequence.drafted_length, sequence.num_drafted = row.entry.start, row.num_tokens
            self._num_drafted.inc(len(row.entry.tokens))
        elif sequence.has_features:
            # The drafter has all that it reads and proposes nothing for this text; asking again would change nothing.
            sequence.pending = None
        elif sequence.pending is not None:
            # The frame is answered without a draft; the draft is made when the features come.
            sequence.pending.frame_id = 0
