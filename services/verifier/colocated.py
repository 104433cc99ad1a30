"""A drafter in the verifier's own process: the class that a drafter process hosts, without a wire.

Responsible for: feeding the drafter, and adding its drafts to the tries. Features stay tensors on the device; a drafter
of keys and values reads them in the target's own cache. While drafting is off, captured rows are kept and projected
many at a time: projecting row by row took 1 % of a step. A drafter that fails is taken out of service; the text
continues without it and is the same.

Deliberately does not know: when to draft, what is verified.

Called by: the step loop's stages, on its thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog
import torch
from torch import Tensor

from paceline.methods.drafter import Drafter, DraftRequest, ReadsInPlace
from paceline.target import TargetEngine
from paceline.target.kv.slot import Slot
from services.verifier.feature_log import owned
from services.verifier.report import CommitReport
from services.verifier.sequence import NO_SLOT, TargetSequence

log = structlog.get_logger()

MAX_CAPTURED_ROWS = 256
"""Captured rows of one sequence while drafting is off; this many are projected, so that little work piles up."""


@dataclass(slots=True)
class CapturedRows:
    """Consecutive rows of one sequence as the target captured them.

    Attributes:
        start: position of the first row.
        end: position after the last row.
        rows: `[n, sources]` each.
        project: turns `[n, sources]` into features `[n, width]`.
    """

    start: int
    end: int
    rows: list[Tensor]
    project: Callable[[Tensor], Tensor]


class ColocatedDrafter:
    """Feeds a drafter and adds its entries to the tries.

    Args:
        drafter: the drafter.
        engine: the target's, for a drafter that can read the KV cache in place; None makes the drafter read features.

    Raises:
        StepError: the cache does not have what the drafter reads.
    """

    def __init__(self, drafter: Drafter, engine: TargetEngine | None = None) -> None:
        self._drafter = drafter
        self._cache = None if engine is None else engine.cache
        self._open: dict[int, TargetSequence] = {}
        self._captured: dict[int, CapturedRows] = {}
        if engine is not None and isinstance(drafter, ReadsInPlace):
            if drafter.tap is not None:
                # Check now: afterwards the tap no longer names what is read in place.
                drafter.tap.check(engine.shape)
            drafter.read_in_place(self._slot)

    def _slot(self, sequence_id: int) -> Slot | None:
        """Where the target holds a sequence's keys and values."""
        sequence = self._open.get(sequence_id)
        if sequence is None or sequence.slot == NO_SLOT or self._cache is None:
            return None
        return self._cache.get(sequence.slot)

    @property
    def method(self) -> str:
        """Drafting method, such as "eagle3"."""
        return self._drafter.method

    @property
    def longest_draft(self) -> int | None:
        """Longest draft in tokens; None where only the positions limit it."""
        return self._drafter.longest_draft

    def knows(self, sequence_id: int) -> bool:
        """Whether the drafter follows a sequence."""
        return sequence_id in self._open

    def open(self, sequence: TargetSequence) -> None:
        """Start drafting for a sequence."""
        self._guard(sequence.sequence_id, self._open_sequence, sequence)

    def _open_sequence(self, sequence: TargetSequence) -> None:
        self._open[sequence.sequence_id] = sequence
        self._drafter.open(sequence.sequence_id, sequence.committed)

    def feed(self, sequence_id: int, start: int, features: Tensor) -> None:
        """Hand over the features `[n, width]` of positions from `start` on."""
        if sequence_id in self._open and self._drafter.tap is not None:
            self._feed_captured(sequence_id)
            self._guard(sequence_id, self._drafter.feed, sequence_id, start, features)

    def keep(
        self, sequence_id: int, start: int, captured: Tensor, project: Callable[[Tensor], Tensor]
    ) -> None:
        """Store what the target captured of positions from `start` on, for when drafting resumes.

        Args:
            sequence_id: the sequence.
            start: position of the first row.
            captured: `[n, sources]`.
            project: turns such rows into features `[n, width]`.
        """
        tap = self._drafter.tap
        if sequence_id not in self._open or tap is None:
            return
        kept = self._captured.get(sequence_id)
        if kept is not None and (tap.last_only or kept.end != start):
            if not tap.last_only:  # the sequence ran its text again from another position
                self._feed_captured(sequence_id)
            kept = None
        if kept is None:
            kept = self._captured[sequence_id] = CapturedRows(start, start, [], project)
        kept.rows.append(owned(captured))
        kept.end += captured.shape[0]
        if kept.end - kept.start >= MAX_CAPTURED_ROWS:
            self._feed_captured(sequence_id)

    def _feed_captured(self, sequence_id: int) -> None:
        kept = self._captured.pop(sequence_id, None)
        if kept is not None:
            features = kept.project(torch.cat(kept.rows))
            self._guard(sequence_id, self._drafter.feed, sequence_id, kept.start, features)

    def close(self, sequence_id: int) -> None:
        """Forget a sequence."""
        self._captured.pop(sequence_id, None)
        if sequence_id in self._open:
            del self._open[sequence_id]
            self._drafter.close(sequence_id)

    def draft(self, commits: Sequence[CommitReport], draft_length: int, max_nodes: int) -> int:
        """Extend the drafter's sequences by what was committed, and draft for all of them together.

        Args:
            commits: what the last step committed to sequences that continue.
            draft_length: tokens of one path.
            max_nodes: nodes of one draft; more than `draft_length` lets the drafter branch.

        Returns:
            How many sequences were drafted for.
        """
        requests, drafted = [], []
        for commit in commits:
            sequence = commit.sequence
            if sequence.sequence_id not in self._open:
                continue
            self._guard(
                sequence.sequence_id,
                self._drafter.extend,
                sequence.sequence_id,
                commit.start,
                commit.tokens,
            )
            num_tokens = min(draft_length, sequence.num_tokens_left - 1, sequence.spec.max_draft_nodes)
            is_due = num_tokens > 0 and sequence.trie.num_nodes < num_tokens
            if is_due and not sequence.is_sure_of_ngram:
                self._feed_captured(sequence.sequence_id)
                if sequence.sequence_id not in self._open:
                    continue
                requests.append(
                    DraftRequest(
                        sequence_id=sequence.sequence_id,
                        num_tokens=num_tokens,
                        max_nodes=min(max_nodes, sequence.spec.max_draft_nodes),
                        sampling=sequence.spec.sampling,
                        reads_features=sequence.spec.reads_features,
                    )
                )
                drafted.append(sequence)
        if not requests:
            return 0
        try:
            entries = self._drafter.draft(requests)
            for sequence, entry in zip(drafted, entries, strict=True):
                if entry is not None:
                    sequence.add_draft(entry)
        except Exception:
            log.exception("the drafter failed; continuing without it", num_sequences=len(drafted))
            for sequence in drafted:
                self._open.pop(sequence.sequence_id, None)
        return len(requests)

    def _guard(self, sequence_id: int, call: object, *arguments: object) -> None:
        """Call the drafter; a failure ends drafting for this sequence alone."""
        assert callable(call)
        try:
            call(*arguments)
        except Exception:
            log.exception("the drafter failed; continuing without it", sequence_id=sequence_id)
            self._open.pop(sequence_id, None)
