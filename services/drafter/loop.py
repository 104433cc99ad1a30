"""The draft loop: one thread that owns the drafter.

Each step takes everything that has come in, drafts for all sequences that can get a pending draft, answers, and drafts
ahead while nothing new has come in. So a drafter that falls behind skips to the newest commit of each sequence: its
work is bounded by what is still of use. Deliberately does not know gRPC or other processes. Fed through
services.drafter.inbox by the servicer and the feature subscriptions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

import structlog

from paceline.methods.drafter import Drafter
from services.drafter.ahead import DraftingAhead
from services.drafter.answers import Answers
from services.drafter.batches import DraftBatches
from services.drafter.inbox import DrafterInbox, Item
from services.drafter.rounds import DraftRounds, RoundLimits
from services.drafter.sequence import DraftSequence
from services.drafter.sequences import DrafterSequences
from services.drafter.session import DraftSession

IDLE_WAIT_S = 1.0

log = structlog.get_logger()


class DraftLoop:
    """The thread and all it owns.

    Args:
        drafter: makes the drafts.
        inbox: what comes in.
        limits: bounds of the loop.
        model_name: label of the metrics.
        on_forgotten: called with the local id of every sequence that goes.
        clock: monotonic seconds.

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
        self._inbox = inbox
        self._clock = clock
        self._answers = Answers(clock)
        self._sequences = DrafterSequences(drafter, limits, self._answers, on_forgotten)
        self._batches = DraftBatches(drafter, limits.max_positions, model_name, clock)
        self._rounds = DraftRounds(self._batches, limits, drafter.method, model_name, clock)
        self._ahead = DraftingAhead(drafter, self._batches, model_name, clock)
        self._on_start: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="draft-loop", daemon=True)

    @property
    def num_sequences(self) -> int:
        """Sequences that are open here."""
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
            wait_s = 0.0
            while not self._inbox.is_closed:
                wait_s = self.step(self._inbox.take(wait_s))
            self._sequences.forget_all()
        except BaseException as error:
            self.failure = error
            log.critical("the draft loop ended", exc_info=error)

    def step(self, items: list[Item]) -> float:
        """Takes items, drafts, answers and drafts ahead.

        Returns:
            Seconds that the next step may wait for items.
        """
        for item in items:
            self._sequences.apply(item)
        now, pending = self._clock(), self._sequences.pending
        chosen = self._rounds.choose(pending, now, may_follow=self._may_follow(pending))
        asked = sessions_that_wait(chosen.sequences)
        drafts = self._rounds.draft(chosen.sequences)
        self._give_back_failed()
        self._sequences.fail_missing_features(now)
        self._answers.send(drafts, asked, sessions_that_wait(self._sequences.pending))
        if chosen.sequences or (self._inbox.is_empty and self._draft_ahead()) or self._answers.has_failures:
            return 0.0
        waits = [at - now for at in (chosen.next_at, self._sequences.next_loss_at) if at is not None]
        return max(0.0, min([IDLE_WAIT_S, *waits]))

    def _may_follow(self, pending: Iterable[DraftSequence]) -> bool:
        """Whether more sequences of a step are likely to come in: of one that was heard of through its features."""
        sessions = {sequence.session for sequence in pending if not sequence.has_unanswered_frame}
        return bool(sessions) and any(sequence.session in sessions for sequence in self._sequences.idle)

    def _draft_ahead(self) -> bool:
        """Drafts ahead for the sequences without a pending draft, and says whether anything was made."""
        drafts = self._ahead.draft(self._sequences.idle, lambda: self._inbox.is_empty)
        for session, answer in drafts.items():
            session.push(answer)
        self._give_back_failed()
        return bool(drafts)

    def _give_back_failed(self) -> None:
        for sequence in self._batches.take_failed():
            self._sequences.fail_draft(sequence)


def sessions_that_wait(sequences: Iterable[DraftSequence]) -> set[DraftSession]:
    """The sessions with a frame that waits for the pending draft of one of these sequences."""
    return {sequence.session for sequence in sequences if sequence.has_unanswered_frame}
