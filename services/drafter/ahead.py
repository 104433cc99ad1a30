"""Drafting ahead: what a drafter does while the target verifies what it drafted.

Responsible for: going on from the end of a draft, or past the likely outcomes of the step that verifies it, whichever
the plan asks for and the mode permits; a little at a time, and broken off as soon as something newer has come in.
What was drafted by then is sent: a target that has stepped on meanwhile takes from it what still fits.

Deliberately does not know: where commits come from, what becomes of the paths. Used by services.drafter.loop, on its
thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import structlog

from paceline.contract.limits import MAX_DRAFT_LENGTH
from paceline.methods.drafter import Drafter, OutcomeRequest, may_rank
from paceline.trie import DraftEntry
from paceline.v1 import drafter_pb2
from services.drafter.rounds import DraftRounds
from services.drafter.sequence import DraftSequence
from services.drafter.session import DraftSession
from services.runtime import metrics

AHEAD_STEP = 2
"""Tokens drafted ahead between two looks at the inbox."""

FLUSH_S = 0.002
"""What took so long to draft is sent before more is: a target that does not wait can verify it in its next step."""

log = structlog.get_logger()


class DraftingAhead:
    """Drafts for sequences whose last draft has been answered.

    Args:
        drafter: also used by `rounds`.
        rounds: runs drafts and packs answers.
        model_name: label of the metrics.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        drafter: Drafter,
        rounds: DraftRounds,
        model_name: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._drafter = drafter
        self._rounds = rounds
        self._clock = clock
        self._num_ahead = metrics.DRAFTED_TOKENS.labels(model_name, drafter.method, "ahead")
        self._num_outcomes = metrics.DRAFTED_TOKENS.labels(model_name, drafter.method, "outcome")

    def draft(
        self, idle: Sequence[DraftSequence], may_go_on: Callable[[], bool]
    ) -> dict[DraftSession, drafter_pb2.DraftResponse]:
        """One answer per session that got any.

        Args:
            idle: sequences that are owed nothing.
            may_go_on: asked between two passes.
        """
        current = [
            sequence
            for sequence in idle
            if sequence.session.plan.draft_length
            and sequence.session.plan.draft_ahead
            and sequence.drafted_length == sequence.length
        ]
        past = [sequence for sequence in current if enumerates(sequence)]
        made, draft_s = self._past_outcomes(past, may_go_on)
        longer, further_s = self._further([s for s in current if not enumerates(s)], may_go_on)
        made += longer
        answers = {sequence.session: drafter_pb2.DraftResponse() for sequence, _ in made}
        self._rounds.fill(answers, made, draft_s + further_s, num_steps=0)
        return answers

    def _past_outcomes(
        self, wanted: Sequence[DraftSequence], may_go_on: Callable[[], bool]
    ) -> tuple[list[tuple[DraftSequence, DraftEntry]], float]:
        """Once per draft: paths past the outcomes that are this drafter's share.

        What is broken off for another session's sake is taken up again when that has been served.
        """
        wanted = [sequence for sequence in wanted if sequence.outcomes_length != sequence.length]
        if not wanted or not may_go_on():
            return [], 0.0
        requests = [
            OutcomeRequest(
                sequence_id=sequence.local_id,
                num_tokens=self._rounds.num_tokens(sequence, sequence.session.plan.draft_ahead),
                max_outcomes=sequence.session.plan.outcomes,
                max_nodes=MAX_DRAFT_LENGTH,
                sampling=sequence.sampling,
                partition=sequence.partition,
                num_partitions=sequence.num_partitions,
            )
            for sequence in wanted
        ]
        begun_at = self._clock()
        was_broken_off = False

        def go_on() -> bool:
            nonlocal was_broken_off
            was_broken_off = not may_go_on()
            return not was_broken_off

        try:
            entries = self._drafter.draft_outcomes(requests, go_on)
            if len(entries) != len(requests):
                raise ValueError(f"{len(entries)} entries for {len(requests)} requests")
        except Exception:  # a draft from the next commit will find the sequence that is at fault
            log.exception("drafting past outcomes failed", num_sequences=len(requests))
            was_broken_off = False
            return [], 0.0
        finally:
            if not was_broken_off:
                for sequence in wanted:
                    sequence.outcomes_length = sequence.length
        made = [(s, entry) for s, entry in zip(wanted, entries, strict=True) if entry is not None]
        self._num_outcomes.inc(sum(len(entry.tokens) for _, entry in made))
        return made, self._clock() - begun_at

    def _further(
        self, wanted: Sequence[DraftSequence], may_go_on: Callable[[], bool]
    ) -> tuple[list[tuple[DraftSequence, DraftEntry]], float]:
        """Longer chains from the same committed length, a few tokens at a time."""
        limits = {
            sequence: self._rounds.num_tokens(
                sequence, sequence.session.plan.draft_length + sequence.session.plan.draft_ahead
            )
            for sequence in wanted
        }
        longest: dict[DraftSequence, DraftEntry] = {}
        draft_s = 0.0
        while True:
            growing = [
                (sequence, min(sequence.num_drafted + AHEAD_STEP, limit))
                for sequence, limit in limits.items()
                if sequence.num_drafted < limit
            ]
            if not growing or draft_s >= FLUSH_S or not may_go_on():
                break
            entries, run_s = self._rounds.run(growing)
            draft_s += run_s
            for (sequence, num_tokens), entry in zip(growing, entries, strict=True):
                if entry is not None and len(entry.tokens) > sequence.num_drafted:
                    longest[sequence] = entry
                    self._num_ahead.inc(len(entry.tokens) - sequence.num_drafted)
                sequence.num_drafted = num_tokens  # also where nothing came of it: it is not tried again
        return list(longest.items()), draft_s


def enumerates(sequence: DraftSequence) -> bool:
    """Whether likely outcomes are drafted past, rather than the end of the draft alone."""
    return sequence.session.plan.outcomes > 0 and may_rank(sequence.sampling)
