"""From the rows of several sequences to one flattened, ragged step.

Chooses row order, positions, padding to row buckets, and which sequences are attended together. It does not validate
(`step.py` does) and runs nothing. Called by the engine once per step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from paceline.target.attention.attend import Segment, StepPlan
from paceline.target.attention.cohort import form_units
from paceline.target.kv.slot import Slot
from paceline.target.step import SequenceRows

PartT = TypeVar("PartT")


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan and the way back to the caller's order.

    Attributes:
        plan: for the executor.
        segments: `(batch index, segment)` in row order.
        logit_counts: rows of logits per segment.
    """

    plan: StepPlan
    segments: list[tuple[int, Segment]]
    logit_counts: list[int]

    def logit_firsts(self) -> list[int]:
        """Where the logits of each sequence begin, as the caller gave the sequences."""
        return self.in_batch_order([*itertools.accumulate(self.logit_counts[:-1], initial=0)])

    def in_batch_order(self, parts: Sequence[PartT]) -> list[PartT]:
        """One part per segment, reordered as the caller gave the sequences."""
        ordered = list(parts)
        for part, (index, _) in zip(parts, self.segments, strict=True):
            ordered[index] = part
        return ordered


def plan_step(
    batch: Sequence[SequenceRows],
    slots: Sequence[Slot],
    capture: frozenset[int],
    row_buckets: Sequence[int],
    device: torch.device,
    *,
    joins_neighbours: bool = True,
) -> PlannedStep:
    """Flatten a checked step.

    Args:
        batch: rows per sequence.
        slots: their slots, grown to fit the rows.
        capture: residual streams to return.
        row_buckets: ascending row counts to pad to; empty for none.
        device: where the index tensors go.
        joins_neighbours: let several sequences be attended in one call.
    """
    tokens: list[int] = []
    positions: list[int] = []
    segments: list[tuple[int, Segment]] = []
    logit_rows: list[int] = []
    logit_counts: list[int] = []
    for index in _row_order(slots) if joins_neighbours else range(len(slots)):
        rows, slot = batch[index], slots[index]
        depths = rows.depths()
        first, count, past = len(tokens), len(rows.tokens), slot.length
        parents = None if rows.is_chain or rows.parents is None else tuple(rows.parents)
        segments.append((index, Segment(slot, first, count, past, parents, depths)))
        tokens.extend(rows.tokens)
        positions.extend([past + depth for depth in depths])
        wanted = rows.logit_rows()
        logit_rows.extend([first + row for row in wanted])
        logit_counts.append(len(wanted))
    padded = next((bucket for bucket in row_buckets if bucket >= len(tokens)), len(tokens))
    tokens.extend([0] * (padded - len(tokens)))
    positions.extend([0] * (padded - len(positions)))
    asks_all = logit_rows == list(range(padded))
    own = [segment for _, segment in segments]
    plan = StepPlan(
        tokens=torch.tensor(tokens, device=device),
        positions=torch.tensor(positions, device=device),
        max_position=max(positions),
        segments=own,
        units=form_units(own) if joins_neighbours else own,
        capture=capture,
        logit_rows=None if asks_all else torch.tensor(logit_rows, dtype=torch.int64, device=device),
        added=_added([batch[index] for index, _ in segments], padded),
    )
    return PlannedStep(plan, segments, logit_counts)


def _added(batch: Sequence[SequenceRows], num_rows: int) -> Tensor | None:
    """What sequences in row order add to their input embeddings: zeros where one adds nothing, None if none does."""
    some = next((rows.added for rows in batch if rows.added is not None), None)
    if some is None:
        return None
    added = some.new_zeros(num_rows, some.shape[1])
    first = 0
    for rows in batch:
        if rows.added is not None:
            added[first : first + len(rows.tokens)] = rows.added
        first += len(rows.tokens)
    return added


def _row_order(slots: Sequence[Slot]) -> list[int]:
    """Batch indices ordered so that neighbouring slots can be attended together."""
    rank: dict[int, int] = {}
    for slot in slots:
        rank.setdefault(id(slot.block), len(rank))
    return sorted(range(len(slots)), key=lambda index: (rank[id(slots[index].block)], slots[index].index))
