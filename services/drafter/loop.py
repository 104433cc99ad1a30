"""The draft loop: one thread that owns the drafter.

Each turn takes everything that has come in, applies it, drafts for all sequences that are owed a draft and can get
one, answers, and, while nothing new has come in, drafts ahead. So a drafter that falls behind skips to the newest
commit of each sequence: its work is bounded by what is still of use. Deliberately does not know gRPC or other
processes. Fed through services.drafter.inbox by the servicer and the feature subscriptions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from paceline.contract.failures import FailureReason, StatusCode
from paceline.methods.drafter import Drafter
from paceline.v1 import drafter_pb2, peer_pb2
from services.drafter.ahead import DraftingAhead
from services.drafter.inbox import DrafterInbox, Features, FeaturesLost, Frame, Item, Opening, SessionEnded
from services.drafter.requests import failure
from services.drafter.rounds import DraftRounds, RoundLimits
from services.drafter.sequence import DraftSequence, Want
from services.drafter.session import DraftSession
from services.runtime.frames import Commit

IDLE_WAIT_S = 1.0

log = structlog.get_logger()


@dataclass(slots=True)
class OpenFrame:
    """The newest frame of a session that has not been answered yet."""

    frame_id: int
    arrived_at: float


class DraftLoop:
    """The thread and all it owns.

    Attributes:
        failure: what ended the loop, if it did not end by `stop`.
    """

    def __init__(
        self,
        drafter: Drafter,
        inbox: DrafterInbox,
        limits: RoundLimits,
        model_name: str,
        on_forgotten: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failure: BaseException | None = None
        self._drafter = drafter
        self._inbox = inbox
        self._limits = limits
        self._on_forgotten = on_forgotten
        self._clock = clock
        self._sequences: dict[int, DraftSequence] = {}  # by local id
        self._open_frames: dict[DraftSession, OpenFrame] = {}
        self._failures: dict[DraftSession, list[peer_pb2.SequenceFailure]] = {}
        self._rounds = DraftRounds(drafter, limits, model_name, clock)
        self._ahead = DraftingAhead(drafter, self._rounds, model_name, clock)
        self._on_start: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="draft-loop", daemon=True)

    @property
    def num_sequences(self) -> int:
        """Sequences held."""
        return len(self._sequences)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self, on_start: Callable[[], None] = lambda: None) -> None:
        """Starts the thread; it calls ``on_start`` first."""
        self._on_start = on_start
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and waits for it."""
        self._inbox.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._on_start()
            timeout_s: float | None = 0.0
            while not self._inbox.is_closed:
                timeout_s = self.turn(self._inbox.take(timeout_s))
            for sequence in list(self._sequences.values()):
                self._forget(sequence)
        except BaseException as error:
            self.failure = error
            log.critical("the draft loop ended", exc_info=error)

    def turn(self, items: list[Item]) -> float | None:
        """One turn; returns for how long the next may wait for items."""
        for item in items:
            self._apply(item)
        now = self._clock()
        pending = [sequence for sequence in self._sequences.values() if sequence.want is not None]
        due, next_at = self._rounds.choose(pending, now, may_follow=self._may_follow(pending))
        # A draft that no frame asked for must not pass for the answer to one that waits for another sequence's.
        asked = {s.session for s in due if s.want is not None and s.want.frame_id}
        answers = self._rounds.draft(due) if due else {}
        for sequence in self._rounds.take_broken():
            self._fail(
                sequence,
                StatusCode.INTERNAL,
                FailureReason.DRAFT_FAILED,
                "the drafter failed on this sequence",
            )
        self._check_features(now)
        self._answer(answers, asked)
        if due or (self._inbox.is_empty and self._draft_ahead()) or self._failures:
            return 0.0
        waits = [at - now for at in (next_at, self._next_loss_at()) if at is not None]
        return max(0.0, min([IDLE_WAIT_S, *waits]))

    # What came in.

    def _apply(self, item: Item) -> None:
        if isinstance(item, Frame):
            self._apply_frame(item)
        elif isinstance(item, Features):
            self._feed(item)
        elif isinstance(item, SessionEnded):
            for sequence in list(item.session.sequences.values()):
                self._forget(sequence)
            self._open_frames.pop(item.session, None)
            self._failures.pop(item.session, None)
        elif isinstance(item, FeaturesLost):
            reader = self._sequences.get(item.local_id)
            if reader is not None:
                self._fail(reader, StatusCode.ABORTED, item.reason, item.message)

    def _apply_frame(self, frame: Frame) -> None:
        session = frame.session
        if frame.frame_id:
            self._open_frames[session] = OpenFrame(frame.frame_id, frame.arrived_at)
        if frame.plan is not None:
            session.plan = frame.plan
        if frame.failures:
            self._failures.setdefault(session, []).extend(frame.failures)
        for wire_id in frame.closes:
            closed = session.sequences.get(wire_id)
            if closed is not None:
                self._forget(closed)
        for opening in frame.openings:
            self._open(frame, opening)
        for commit in frame.commits:
            self._commit(frame, commit)

    def _open(self, frame: Frame, opening: Opening) -> None:
        session = frame.session
        earlier = session.sequences.get(opening.wire_id)
        if earlier is not None:
            self._forget(earlier)
        sequence = DraftSequence(
            session=session,
            local_id=opening.local_id,
            wire_id=opening.wire_id,
            epoch=opening.epoch,
            sampling=opening.sampling,
            max_draft_tokens=opening.max_draft_tokens,
            length=len(opening.tokens),
            partition=opening.partition,
            num_partitions=opening.num_partitions,
            reads_features=opening.reads_features,
            reads_last_only=self._drafter.tap is not None and self._drafter.tap.last_only,
        )
        self._sequences[sequence.local_id] = session.sequences[sequence.wire_id] = sequence
        if len(self._sequences) > self._limits.max_sequences:
            message = f"this drafter holds {self._limits.max_sequences} sequences"
            self._fail(sequence, StatusCode.RESOURCE_EXHAUSTED, FailureReason.CAPACITY_EXHAUSTED, message)
            return
        if self._guard(sequence, lambda: self._drafter.open(sequence.local_id, opening.tokens)):
            self._want(sequence, frame.frame_id, frame.arrived_at)

    def _commit(self, frame: Frame, commit: Commit) -> None:
        sequence = frame.session.sequences.get(commit.sequence_id)
        if sequence is None or sequence.epoch != commit.epoch:
            return
        if commit.start > sequence.length:
            message = f"commit from {commit.start}, known up to {sequence.length}"
            self._fail(sequence, StatusCode.ABORTED, FailureReason.COMMIT_GAP, message)
            return
        fresh = commit.tokens[sequence.length - commit.start :]
        if not fresh:
            return
        if sequence.length + len(fresh) >= self._limits.max_positions:
            message = f"this drafter has {self._limits.max_positions} positions"
            self._fail(sequence, StatusCode.OUT_OF_RANGE, FailureReason.OUT_OF_POSITIONS, message)
            return
        if self._extend(sequence, fresh):
            self._want(sequence, frame.frame_id, frame.arrived_at)

    def _extend(self, sequence: DraftSequence, fresh: Sequence[int]) -> bool:
        start = sequence.length
        if not self._guard(sequence, lambda: self._drafter.extend(sequence.local_id, start, fresh)):
            return False
        sequence.length += len(fresh)
        sequence.has_commits = True
        return True

    def _want(self, sequence: DraftSequence, frame_id: int, arrived_at: float) -> None:
        sequence.want = Want(frame_id, arrived_at, arrived_at + self._limits.feature_wait_s)

    def _feed(self, chunk: Features) -> None:
        """Feeds what continues the known features; repeats are cut, what lies past a gap is dropped.

        A drafter that reads the newest position alone knows no gaps.
        """
        sequence = self._sequences.get(chunk.local_id)
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
            self._go_on(sequence, chunk)

    def _go_on(self, sequence: DraftSequence, chunk: Features) -> None:
        """Drafts from tokens that came with their features, a hop before the conductor's commit says the same.

        The commit's frame, when it comes, finds nothing new in it and is answered without drafts.
        """
        start, length = chunk.tokens_start, sequence.length
        fresh = chunk.tokens[length - start :] if start <= length else ()
        if (
            fresh
            and length + len(fresh) < self._limits.max_positions
            and self._extend(sequence, fresh)
            and sequence.want is None
            and sequence.session.plan.draft_length
        ):
            self._want(sequence, 0, chunk.arrived_at)

    # What goes out.

    def _may_follow(self, pending: Sequence[DraftSequence]) -> bool:
        """Whether more sequences of a step that was heard of through its features are likely to come in."""
        sessions = {s.session for s in pending if s.want is not None and not s.want.frame_id}
        return any(sequence.want is None for session in sessions for sequence in session.sequences.values())

    def _answer(
        self, answers: dict[DraftSession, drafter_pb2.DraftResponse], asked: set[DraftSession]
    ) -> None:
        """Answers every session that has drafts or failures to hear of, or whose frame waits for no draft.

        Args:
            answers: made in this turn.
            asked: sessions one of whose frames asked for a draft in them.
        """
        waiting = {
            sequence.session
            for sequence in self._sequences.values()
            if sequence.want is not None and sequence.want.frame_id
        }
        for session in {*answers, *self._failures, *(set(self._open_frames) - waiting)}:
            answer = answers.get(session) or drafter_pb2.DraftResponse()
            is_answered = session in asked or session not in waiting
            frame = self._open_frames.pop(session, None) if is_answered else None
            if frame is not None:
                answer.frame_id = frame.frame_id
                waited_s = self._clock() - frame.arrived_at - answer.draft_us / 1e6
                answer.queue_us = max(int(waited_s * 1e6), 0)
            answer.failures.extend(self._failures.pop(session, ()))
            session.push(answer)

    def _draft_ahead(self) -> bool:
        """Drafts past what was answered, for the sequences whose plan asks for it; says whether there were any."""
        answers = self._ahead.draft(
            [sequence for sequence in self._sequences.values() if sequence.want is None],
            lambda: self._inbox.is_empty,
        )
        for session, answer in answers.items():
            session.push(answer)
        for sequence in self._rounds.take_broken():
            self._fail(
                sequence,
                StatusCode.INTERNAL,
                FailureReason.DRAFT_FAILED,
                "the drafter failed on this sequence",
            )
        return bool(answers)

    # Ends.

    def _check_features(self, now: float) -> None:
        """Gives back the sequences whose features have stopped coming."""
        for sequence in list(self._sequences.values()):
            if not self._is_missing(sequence):
                sequence.missing_since = None
            elif sequence.missing_since is None:
                sequence.missing_since = now
            elif now - sequence.missing_since > self._limits.feature_loss_s:
                message = f"features end at {sequence.num_features}, the text at {sequence.length}"
                self._fail(sequence, StatusCode.ABORTED, FailureReason.FEATURES_LOST, message)

    def _is_missing(self, sequence: DraftSequence) -> bool:
        """A commit proves that the target has run all positions before it; until one comes, it may not have begun."""
        return sequence.has_commits and sequence.lacks_features

    def _next_loss_at(self) -> float | None:
        times = [s.missing_since for s in self._sequences.values() if s.missing_since is not None]
        return min(times) + self._limits.feature_loss_s if times else None

    def _guard(self, sequence: DraftSequence, call: Callable[[], None]) -> bool:
        """Calls into the drafter; what it raises costs this sequence alone."""
        try:
            call()
        except Exception as error:
            log.exception("the drafter failed on a sequence", sequence_id=sequence.wire_id)
            self._fail(
                sequence, StatusCode.INTERNAL, FailureReason.DRAFT_FAILED, f"{type(error).__name__}: {error}"
            )
            return False
        return True

    def _fail(self, sequence: DraftSequence, code: int, reason: str, message: str) -> None:
        self._failures.setdefault(sequence.session, []).append(
            failure(sequence.wire_id, code, reason, message)
        )
        self._forget(sequence)

    def _forget(self, sequence: DraftSequence) -> None:
        self._sequences.pop(sequence.local_id, None)
        if sequence.session.sequences.get(sequence.wire_id) is sequence:
            del sequence.session.sequences[sequence.wire_id]
        self._on_forgotten(sequence.local_id)
        try:
            self._drafter.close(sequence.local_id)
        except Exception:
            log.exception("the drafter failed to close a sequence", sequence_id=sequence.wire_id)
