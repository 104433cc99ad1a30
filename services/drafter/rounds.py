"""Draft rounds: which sequences are drafted for now, the drafting, and the answers.

Responsible for: waiting a bounded time for features, gathering sequences so that they are drafted together, turning
entries into packed answers. Deliberately does not know where commits come from, nor of drafting ahead (`ahead.py`).
Used by services.drafter.loop, on its thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from paceline.contract.limits import MAX_DRAFT_LENGTH
from paceline.methods.drafter import Drafter, DraftRequest
from paceline.trie import DraftEntry
from paceline.v1 import drafter_pb2
from services.drafter.sequence import DraftSequence
from services.drafter.session import DraftSession
from services.runtime import metrics
from services.runtime.frames import pack_drafts

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """Bounds of the loop; times in seconds.

    Attributes:
        max_sequences: sequences held at once.
        max_positions: positions the drafter has.
        feature_wait_s: longest wait of a draft for features.
        feature_gather_s: wait of sequences that could be drafted for others of the same moment.
        feature_loss_s: features missing for longer are lost.
    """

    max_sequences: int = 256
    max_positions: int = 1 << 20
    feature_wait_s: float = 0.1
    feature_gather_s: float = 0.001
    feature_loss_s: float = 5.0


class DraftRounds:
    """Runs the drafter for batches of sequences."""

    def __init__(
        self,
        drafter: Drafter,
        limits: RoundLimits,
        model_name: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._drafter = drafter
        self._limits = limits
        self._clock = clock
        self._broken: list[DraftSequence] = []
        labels = (model_name, drafter.method)
        self._draft_seconds = metrics.DRAFT_SECONDS.labels(*labels)
        self._queue_seconds = metrics.DRAFT_QUEUE_SECONDS.labels(*labels)
        self._num_drafted = metrics.DRAFTED_TOKENS.labels(*labels, "answer")

    def choose(
        self, pending: Sequence[DraftSequence], now: float, *, may_follow: bool = False
    ) -> tuple[list[DraftSequence], float | None]:
        """The sequences to draft for now, and when to look again where others, or all, should wait.

        A sequence is ready with its features in. One that has waited too long is drafted for as it is (many drafters
        can go on from states of their own); where the drafter cannot, it stays owed until features come.

        Args:
            pending: sequences that wait for a draft.
            now: the time.
            may_follow: others of the same step, which are not owed anything yet, are likely to come in.
        """
        ready: list[DraftSequence] = []
        expired: list[DraftSequence] = []
        waiting: list[float] = []
        first_arrival = now
        for sequence in pending:
            assert sequence.want is not None
            if sequence.has_features:
                ready.append(sequence)
                first_arrival = min(first_arrival, sequence.want.arrived_at)
            elif sequence.want.frame_id and now >= sequence.want.expires_at:
                expired.append(sequence)
            elif sequence.want.frame_id:
                waiting.append(sequence.want.expires_at)
        if expired:
            return ready + expired, None
        if ready and (waiting or may_follow) and now < first_arrival + self._limits.feature_gather_s:
            return [], first_arrival + self._limits.feature_gather_s
        return ready, min(waiting, default=None)

    def draft(self, due: Sequence[DraftSequence]) -> dict[DraftSession, drafter_pb2.DraftResponse]:
        """Drafts once for all of `due`; one answer per session, without drafts where there are none."""
        wanted: list[tuple[DraftSequence, int]] = []
        waited_s = 0.0
        begun_at = self._clock()
        for sequence in due:
            assert sequence.want is not None
            self._queue_seconds.observe(max(begun_at - sequence.want.arrived_at, 0.0))
            num_tokens = self.num_tokens(sequence, sequence.session.plan.draft_length)
            if num_tokens > 0:
                wanted.append((sequence, num_tokens))
                waited_s += max(begun_at - sequence.complete_at, 0.0)
            else:
                sequence.want = None
        entries, draft_s = self.run(wanted, may_branch=True)
        answers = {sequence.session: drafter_pb2.DraftResponse() for sequence in due}
        for (sequence, num_tokens), entry in zip(wanted, entries, strict=True):
            if entry is None:
                # It has had its answer. Where its features are missing it is drafted for when they come; a drafter that
                # has all that it reads has nothing to say of this text, and asking again would change nothing.
                if sequence.has_features:
                    sequence.want = None
                elif sequence.want is not None:
                    sequence.want.frame_id = 0
                continue
            sequence.want = None
            sequence.drafted_length, sequence.num_drafted = entry.start, num_tokens
            self._num_drafted.inc(len(entry.tokens))
        made = [
            (sequence, entry)
            for (sequence, _), entry in zip(wanted, entries, strict=True)
            if entry is not None and sequence.partition == 0  # the other shares draft it to find its outcomes
        ]
        num_steps = max((num_tokens for _, num_tokens in wanted), default=0) if made else 0
        self.fill(answers, made, draft_s, num_steps, waited_s / max(len(wanted), 1))
        return answers

    def take_broken(self) -> list[DraftSequence]:
        """The sequences on which the drafter raised since the last call."""
        broken, self._broken = self._broken, []
        return broken

    def num_tokens(self, sequence: DraftSequence, length: int) -> int:
        """As many tokens in a row as were asked for, and as fit the request, the frames and the drafter's positions."""
        room = self._limits.max_positions - sequence.length
        return min(length, sequence.max_draft_tokens, MAX_DRAFT_LENGTH, room)

    def run(
        self, wanted: Sequence[tuple[DraftSequence, int]], *, may_branch: bool = False
    ) -> tuple[list[DraftEntry | None], float]:
        """Calls the drafter; where it raises for a batch, each sequence is tried alone, to find the one at fault."""
        if not wanted:
            return [], 0.0
        requests = [
            DraftRequest(
                sequence_id=sequence.local_id,
                num_tokens=num_tokens,
                max_nodes=_max_nodes(sequence, num_tokens) if may_branch else 0,
                sampling=sequence.sampling,
                reads_features=sequence.reads_features,
            )
            for sequence, num_tokens in wanted
        ]
        begun_at = self._clock()
        entries: list[DraftEntry | None]
        try:
            entries = list(self._drafter.draft(requests))
            if len(entries) != len(requests):
                raise ValueError(f"{len(entries)} entries for {len(requests)} requests")
        except Exception:
            log.exception("the drafter failed on a batch", num_sequences=len(requests))
            entries = []
            for (sequence, _), request in zip(wanted, requests, strict=True):
                try:
                    (entry,) = self._drafter.draft([request])
                except Exception:
                    entry = None
                    sequence.want = None
                    self._broken.append(sequence)
                entries.append(entry)
        draft_s = self._clock() - begun_at
        self._draft_seconds.observe(draft_s)
        return entries, draft_s

    def fill(
        self,
        answers: dict[DraftSession, drafter_pb2.DraftResponse],
        made: Sequence[tuple[DraftSequence, DraftEntry]],
        draft_s: float,
        num_steps: int,
        waited_s: float = 0.0,
    ) -> None:
        """Packs the entries into the answers of their sessions. Times are the batch's: each waited for all of it."""
        for session, answer in answers.items():
            own = [(s.wire_id, s.epoch, entry) for s, entry in made if s.session is session and entry.tokens]
            if own:
                answer.drafts.CopyFrom(pack_drafts(own))
                answer.num_draft_steps = num_steps
                answer.num_sequences = len(made)
                answer.wait_us = int(waited_s * 1e6)
            answer.draft_us = int(draft_s * 1e6)


def _max_nodes(sequence: DraftSequence, num_tokens: int) -> int:
    """Nodes of a draft; of one whose outcomes are to be drafted past always those of a tree, be it a narrow one."""
    plan = sequence.session.plan
    wanted = max(plan.max_nodes, num_tokens + 1) if plan.outcomes and plan.draft_ahead else plan.max_nodes
    return min(wanted, sequence.max_draft_tokens)
