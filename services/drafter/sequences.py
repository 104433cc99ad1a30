"""The sequences of a draft loop, and what incoming items do to them.

Responsible for: applying frames and features in order of arrival, telling the drafter of them, and giving back a
sequence on which something fails. Deliberately does not know when drafts are made. Used by services.drafter.loop, on
its thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from paceline.contract.failures import FailureReason, StatusCode
from paceline.methods.drafter import Drafter
from services.drafter.answers import Answers
from services.drafter.inbox import Features, FeaturesLost, Frame, Item, Opening, SessionEnded
from services.drafter.requests import failure
from services.drafter.rounds import RoundLimits
from services.drafter.sequence import DraftSequence, PendingDraft
from services.drafter.session import DraftSession
from services.runtime.frames import Commit

log = structlog.get_logger()


class DrafterSequences:
    """All sequences that conductors have open here.

    Args:
        drafter: follows every sequence.
        limits: bounds on their number, length and missing features.
        answers: gets the failures.
        on_forgotten: called with the local id of every sequence that goes.
    """

    def __init__(
        self, drafter: Drafter, limits: RoundLimits, answers: Answers, on_forgotten: Callable[[int], None]
    ) -> None:
        self._drafter = drafter
        self._limits = limits
        self._answers = answers
        self._on_forgotten = on_forgotten
        self._by_local_id: dict[int, DraftSequence] = {}
        self._by_sequence_id: dict[tuple[DraftSession, int], DraftSequence] = {}

    def __len__(self) -> int:
        return len(self._by_local_id)

    @property
    def pending(self) -> list[DraftSequence]:
        """Sequences with a pending draft."""
        return [sequence for sequence in self._by_local_id.values() if sequence.pending is not None]

    @property
    def idle(self) -> list[DraftSequence]:
        """Sequences without a pending draft."""
        return [sequence for sequence in self._by_local_id.values() if sequence.pending is None]

    # What came in.

    def apply(self, item: Item) -> None:
        """Applies one item of the inbox."""
        if isinstance(item, Frame):
            self._apply_frame(item)
        elif isinstance(item, Features):
            self._feed(item)
        elif isinstance(item, SessionEnded):
            for sequence in [s for s in self._by_local_id.values() if s.session is item.session]:
                self.forget(sequence)
            self._answers.forget(item.session)
        elif isinstance(item, FeaturesLost):
            reader = self._by_local_id.get(item.local_id)
            if reader is not None:
                self.fail(reader, StatusCode.ABORTED, item.reason, item.message)

    def _apply_frame(self, frame: Frame) -> None:
        session = frame.session
        if frame.frame_id:
            self._answers.expect(session, frame.frame_id, frame.arrived_at)
        if frame.policy is not None:
            session.policy = frame.policy
        if frame.failures:
            self._answers.add_failures(session, frame.failures)
        for sequence_id in frame.closes:
            closed = self._by_sequence_id.get((session, sequence_id))
            if closed is not None:
                self.forget(closed)
        for opening in frame.openings:
            self._open(frame, opening)
        for commit in frame.commits:
            self._commit(frame, commit)

    def _open(self, frame: Frame, opening: Opening) -> None:
        session = frame.session
        earlier = self._by_sequence_id.get((session, opening.sequence_id))
        if earlier is not None:
            self.forget(earlier)
        sequence = DraftSequence(
            session=session,
            local_id=opening.local_id,
            sequence_id=opening.sequence_id,
            epoch=opening.epoch,
            sampling=opening.sampling,
            max_draft_tokens=opening.max_draft_tokens,
            length=len(opening.tokens),
            partition=opening.partition,
            num_partitions=opening.num_partitions,
            reads_features=opening.reads_features,
            reads_last_only=self._drafter.tap is not None and self._drafter.tap.last_only,
        )
        self._by_local_id[sequence.local_id] = sequence
        self._by_sequence_id[session, sequence.sequence_id] = sequence
        if len(self._by_local_id) > self._limits.max_sequences:
            message = f"this drafter holds {self._limits.max_sequences} sequences"
            self.fail(sequence, StatusCode.RESOURCE_EXHAUSTED, FailureReason.CAPACITY_EXHAUSTED, message)
            return
        if self._guard(sequence, lambda: self._drafter.open(sequence.local_id, opening.tokens)):
            self._ask(sequence, frame.frame_id, frame.arrived_at)

    def _commit(self, frame: Frame, commit: Commit) -> None:
        sequence = self._by_sequence_id.get((frame.session, commit.sequence_id))
        if sequence is None or sequence.epoch != commit.epoch:
            return
        if commit.start > sequence.length:
            message = f"the commit starts at {commit.start}, the known text ends at {sequence.length}"
            self.fail(sequence, StatusCode.ABORTED, FailureReason.COMMIT_GAP, message)
            return
        new_tokens = commit.tokens[sequence.length - commit.start :]
        if not new_tokens:
            return
        if sequence.length + len(new_tokens) >= self._limits.max_positions:
            message = f"this drafter has {self._limits.max_positions} positions"
            self.fail(sequence, StatusCode.OUT_OF_RANGE, FailureReason.OUT_OF_POSITIONS, message)
            return
        if self._extend(sequence, new_tokens):
            self._ask(sequence, frame.frame_id, frame.arrived_at)

    def _extend(self, sequence: DraftSequence, new_tokens: Sequence[int]) -> bool:
        start = sequence.length
        if not self._guard(sequence, lambda: self._drafter.extend(sequence.local_id, start, new_tokens)):
            return False
        sequence.length += len(new_tokens)
        sequence.has_commits = True
        return True

    def _ask(self, sequence: DraftSequence, frame_id: int, arrived_at: float) -> None:
        sequence.pending = PendingDraft(frame_id, arrived_at, arrived_at + self._limits.feature_wait_s)

    def _feed(self, chunk: Features) -> None:
        """Feeds the features that continue the known ones; cuts repeats, and drops what comes after a gap.

        For a drafter that reads the newest position alone, no gap exists.
        """
        sequence = self._by_local_id.get(chunk.local_id)
        if sequence is None or not sequence.reads_features:
            return
        known = sequence.num_features
        if sequence.reads_last_only:
            known = max(known, chunk.start)
        rows = chunk.rows[known - chunk.start :] if chunk.start <= known else chunk.rows[:0]
        if len(rows) == 0:
            return
        if self._guard(sequence, lambda: self._drafter.feed(sequence.local_id, known, rows)):
            sequence.num_features = known + len(rows)
            sequence.fed_at = chunk.arrived_at
            sequence.missing_since = None
            self._extend_from_features(sequence, chunk)

    def _extend_from_features(self, sequence: DraftSequence, chunk: Features) -> None:
        """Takes tokens that came with their features, one hop before the conductor's commit brings the same tokens.

        The frame of that commit then brings nothing new, and is answered without drafts.
        """
        start, length = chunk.tokens_start, sequence.length
        new_tokens = chunk.tokens[length - start :] if start <= length else ()
        if (
            new_tokens
            and length + len(new_tokens) < self._limits.max_positions
            and self._extend(sequence, new_tokens)
            and sequence.pending is None
            and sequence.session.policy.draft_length
        ):
            self._ask(sequence, 0, chunk.arrived_at)

    # What goes.

    def fail_missing_features(self, now: float) -> None:
        """Gives back the sequences whose features have stopped coming."""
        for sequence in list(self._by_local_id.values()):
            if not sequence.is_missing_features:
                sequence.missing_since = None
            elif sequence.missing_since is None:
                sequence.missing_since = now
            elif now - sequence.missing_since > self._limits.feature_loss_s:
                message = f"features end at {sequence.num_features}, the text at {sequence.length}"
                self.fail(sequence, StatusCode.ABORTED, FailureReason.FEATURES_LOST, message)

    @property
    def next_loss_at(self) -> float | None:
        """When missing features next count as lost; None while none are missing."""
        times = [s.missing_since for s in self._by_local_id.values() if s.missing_since is not None]
        return min(times) + self._limits.feature_loss_s if times else None

    def fail_draft(self, sequence: DraftSequence) -> None:
        """Gives back a sequence on which the drafter raised."""
        self.fail(
            sequence, StatusCode.INTERNAL, FailureReason.DRAFT_FAILED, "the drafter failed on this sequence"
        )

    def fail(self, sequence: DraftSequence, code: int, reason: str, message: str) -> None:
        """Gives a sequence back to its conductor."""
        self._answers.add_failures(sequence.session, [failure(sequence.sequence_id, code, reason, message)])
        self.forget(sequence)

    def forget(self, sequence: DraftSequence) -> None:
        """Drops a sequence here and in the drafter."""
        self._by_local_id.pop(sequence.local_id, None)
        key = sequence.session, sequence.sequence_id
        if self._by_sequence_id.get(key) is sequence:
            del self._by_sequence_id[key]
        self._on_forgotten(sequence.local_id)
        try:
            self._drafter.close(sequence.local_id)
        except Exception:
            log.exception("the drafter failed to close a sequence", sequence_id=sequence.sequence_id)

    def forget_all(self) -> None:
        """Drops every sequence."""
        for sequence in list(self._by_local_id.values()):
            self.forget(sequence)

    def _guard(self, sequence: DraftSequence, call: Callable[[], None]) -> bool:
        """Calls the drafter; an exception costs this sequence alone."""
        try:
            call()
        except Exception as error:
            log.exception("the drafter failed on a sequence", sequence_id=sequence.sequence_id)
            self.fail(
                sequence, StatusCode.INTERNAL, FailureReason.DRAFT_FAILED, f"{type(error).__name__}: {error}"
            )
            return False
        return True
