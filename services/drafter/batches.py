"""Batches of draft requests: the calls of the drafter, and their entries packed into answers.

Responsible for: how much each sequence may be asked for, finding the sequence at fault where the drafter raises, and
packing entries. Deliberately does not know which sequences are asked for, nor when. Used by services.drafter.rounds and
services.drafter.ahead, on the loop's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from paceline.contract.limits import MAX_DRAFT_LENGTH
from paceline.drafts import DraftEntry
from paceline.methods.drafter import Drafter, DraftRequest
from paceline.v1 import drafter_pb2
from services.drafter.sequence import DraftSequence
from services.drafter.session import DraftSession
from services.runtime import metrics
from services.runtime.frames import pack_drafts

log = structlog.get_logger()


@dataclass(slots=True)
class DraftRow:
    """One sequence in a call of the drafter.

    Attributes:
        sequence: the sequence.
        num_tokens: draft tokens in a row that are asked for.
        entry: what the drafter made; None before the call, and where the drafter has nothing to propose.
    """

    sequence: DraftSequence
    num_tokens: int
    entry: DraftEntry | None = None


class DraftBatches:
    """Calls the drafter.

    Args:
        drafter: makes the drafts.
        max_positions: positions the drafter has.
        model_name: label of the metrics.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        drafter: Drafter,
        max_positions: int,
        model_name: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._drafter = drafter
        self._max_positions = max_positions
        self._clock = clock
        self._failed: list[DraftSequence] = []
        self._draft_seconds = metrics.DRAFT_SECONDS.labels(model_name, drafter.method)

    def num_tokens(self, sequence: DraftSequence, length: int) -> int:
        """Tokens in a row to draft: `length`, as far as request, frames and the drafter's positions allow."""
        num_free_positions = self._max_positions - sequence.length
        return min(length, sequence.max_draft_tokens, MAX_DRAFT_LENGTH, num_free_positions)

    def run(self, rows: Sequence[DraftRow], *, may_branch: bool = False) -> float:
        """Calls the drafter for a batch and fills in its entries.

        Where the drafter raises for the batch, each sequence is tried alone, to find the one at fault.

        Returns:
            Seconds it took.
        """
        if not rows:
            return 0.0
        requests = [
            DraftRequest(
                sequence_id=row.sequence.local_id,
                num_tokens=row.num_tokens,
                max_nodes=_max_nodes(row) if may_branch else 0,
                sampling=row.sequence.sampling,
                reads_features=row.sequence.reads_features,
            )
            for row in rows
        ]
        started_at = self._clock()
        try:
            entries = self._drafter.draft(requests)
            if len(entries) != len(requests):
                raise ValueError(f"{len(entries)} entries for {len(requests)} requests")
        except Exception:
            log.exception("the drafter failed on a batch", num_sequences=len(requests))
            self._run_one_by_one(rows, requests)
        else:
            for row, entry in zip(rows, entries, strict=True):
                row.entry = entry
        draft_s = self._clock() - started_at
        self._draft_seconds.observe(draft_s)
        return draft_s

    def _run_one_by_one(self, rows: Sequence[DraftRow], requests: Sequence[DraftRequest]) -> None:
        for row, request in zip(rows, requests, strict=True):
            try:
                (row.entry,) = self._drafter.draft([request])
            except Exception:  # logged with the batch
                row.sequence.pending = None
                self._failed.append(row.sequence)

    def take_failed(self) -> list[DraftSequence]:
        """The sequences on which the drafter raised since the last call."""
        failed, self._failed = self._failed, []
        return failed


def pack(
    answers: dict[DraftSession, drafter_pb2.DraftResponse],
    made: Sequence[DraftRow],
    draft_s: float,
    num_steps: int,
    waited_s: float = 0.0,
) -> None:
    """Packs entries into the answers of their sessions. Times are the batch's: each sequence waited for all of it.

    Args:
        answers: one for each session, to be filled.
        made: rows with an entry.
        draft_s: seconds the drafter took.
        num_steps: tokens in a row of the longest draft; 0 for drafts made ahead, which are no measurement.
        waited_s: mean seconds from complete inputs to the start of drafting.
    """
    for session, answer in answers.items():
        own = [
            (row.sequence.sequence_id, row.sequence.epoch, row.entry)
            for row in made
            if row.sequence.session is session and row.entry is not None and row.entry.tokens
        ]
        if own:
            answer.drafts.CopyFrom(pack_drafts(own))
            answer.num_draft_steps = num_steps
            answer.num_sequences = len(made)
            answer.wait_us = int(waited_s * 1e6)
        answer.draft_us = int(draft_s * 1e6)


def _max_nodes(row: DraftRow) -> int:
    """Nodes of a draft: at least a narrow tree where its verification outcomes are to be drafted ahead for."""
    policy = row.sequence.session.policy
    num_nodes = policy.max_nodes_per_sequence
    if policy.num_outcomes and policy.draft_ahead:
        num_nodes = max(num_nodes, row.num_tokens + 1)
    return min(num_nodes, row.sequence.max_draft_tokens)
