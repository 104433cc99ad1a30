"""The rows that one-pass drafters learn from: sampling, who sees whom, and segments (P-EAGLE, 2602.01469).

Responsible for conditional drop-token sampling, the attention pattern over the flat list of rows, and sequence
partitioning. Pure functions; knows no weights. Called by :mod:`paceline.methods.p_eagle.objective` and
:mod:`paceline.methods.pard1.objective`.

A row has an *anchor*, the last true position that it knows, and a *depth*, the positions from the anchor to the row.
Its position is their sum. Rows of depth 0 read true features; all others are mask rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.training.attention import Chain, Pattern


def sample_rows(in_loss: Tensor, num_depths: int, keep_ratio: float, keep_floor: float) -> Tensor:
    """Conditional drop-token sampling: every true position, and at each depth ``keep_ratio`` of the depth before.

    A row of depth ``d`` is drawn from the successors of rows kept at depth ``d - 1``, so the whole chain before every
    kept row exists. Draws from torch's global random state, which a run's checkpoint holds.

    Args:
        in_loss: bool ``[length]``: positions whose rows have a target.
        num_depths: depths, the true rows included.
        keep_ratio: rows of depth ``d`` are about ``length * keep_ratio ** d``.
        keep_floor: least fraction of rows at any depth.

    Returns:
        Anchors and depths, int64 ``[2, rows]``, by depth and then by anchor.
    """
    length = in_loss.shape[0]
    parts = [torch.stack([torch.arange(length), torch.zeros(length, dtype=torch.int64)])]
    candidates = in_loss.nonzero().squeeze(-1)
    candidates = candidates[candidates > 0]  # there is no anchor before the first position
    num_seeds = candidates.numel()
    for depth in range(1, num_depths):
        count = int(max(0, num_seeds - depth) * max(keep_ratio**depth, keep_floor))
        chosen = torch.randperm(candidates.numel())[:count].sort().values
        kept = candidates[chosen]  # positions
        if not kept.numel():
            break
        parts.append(torch.stack([kept - depth, torch.full_like(kept, depth)]))
        candidates = kept[kept + 1 < length] + 1
        candidates = candidates[in_loss[candidates]]
    return torch.cat(parts, dim=1)


def all_rows(length: int, num_depths: int) -> Tensor:
    """Every depth of every anchor with a position within the text: int64 ``[2, rows]``."""
    depth, anchor = torch.meshgrid(torch.arange(num_depths), torch.arange(length), indexing="ij")
    fits = anchor + depth < length
    return torch.stack([anchor[fits], depth[fits]])


def owners(rows: Tensor, length: int, num_segments: int) -> Tensor:
    """Segment of each row, int64 ``[n]``: by position; a mask row by the position of its chain's first row."""
    anchor, depth = rows
    owner: Tensor = (anchor + (depth > 0)) * num_segments // length
    return owner.clamp_max(num_segments - 1)


@dataclass(frozen=True, slots=True)
class FlatRows:
    """Rows of several texts, padded at the end with copies of the first row.

    Attributes:
        anchors: int64 ``[texts, n]``.
        depths: int64 ``[texts, n]``.
        is_own: bool ``[texts, n]``: rows with a loss, neither padding nor context of another segment.
    """

    anchors: Tensor
    depths: Tensor
    is_own: Tensor

    @property
    def positions(self) -> Tensor:
        """Position of each row, ``[texts, n]``."""
        return self.anchors + self.depths

    @classmethod
    def pad(cls, rows: Sequence[Tensor], is_own: Sequence[Tensor]) -> FlatRows:
        """Puts texts into one batch.

        Args:
            rows: anchors and depths ``[2, n]`` of each text: first the true rows from position 0 on, then mask rows by
                depth, each with its whole chain.
            is_own: bool ``[n]`` of each text.
        """
        room = max(part.shape[1] for part in rows)
        padded = torch.zeros(2, len(rows), room, dtype=torch.int64)
        own = torch.zeros(len(rows), room, dtype=torch.bool)
        for index, (part, part_own) in enumerate(zip(rows, is_own, strict=True)):
            padded[:, index, : part.shape[1]] = part
            own[index, : part.shape[1]] = part_own
        return cls(padded[0], padded[1], own)

    def pattern(self, dtype: torch.dtype, window: int | None = None) -> Pattern:
        """Who sees whom: a row sees true rows up to its anchor, and its own chain up to itself; no row sees padding.

        Args:
            dtype: compute type.
            window: positions that a row sees, its own included; None for all.
        """
        texts, count = self.anchors.shape
        place = torch.arange(count)
        is_true = (self.depths == 0) & (self.anchors == place)
        shared = place[: int(is_true.sum(1).max())]
        is_hidden = shared > self.anchors[..., None]
        if window is not None:
            is_hidden |= self.positions[..., None] - shared >= window
        bias = torch.zeros(is_hidden.shape, dtype=dtype).masked_fill_(is_hidden, -torch.inf)
        # The row of each anchor and depth. Padding overwrites the first row's entry, which no chain reads.
        deepest, text = int(self.depths.max()), torch.arange(texts)[:, None]
        row_of = torch.zeros(texts, int(self.anchors.max()) + 1, deepest + 1, dtype=torch.int64)
        row_of[text, self.anchors, self.depths] = place.expand(texts, -1)
        chains = []
        for depth in range(1, deepest + 1):
            has = self.depths >= depth
            first = int(has.any(0).nonzero()[0])
            rows = row_of[text, self.anchors[:, first:], depth]
            is_hidden = ~has[:, first:]
            if window is not None:
                is_hidden |= self.depths[:, first:] - depth >= window
            hidden = torch.zeros(rows.shape, dtype=dtype).masked_fill_(is_hidden, -torch.inf)
            chains.append(Chain(first, rows, hidden))
        return Pattern(bias, tuple(chains))


def segments(rows: Sequence[Tensor], lengths: Sequence[int], num_segments: int) -> list[FlatRows]:
    """Partitions texts (Algorithm 1): each segment has its own rows, and all true rows before them as context.

    A mask row sees only its own chain and true rows up to its anchor. Both belong to its segment or to the context. So
    losses and gradients of all segments add up to those of the whole text.
    """
    out = []
    for index in range(num_segments):
        parts, own = [], []
        for text, length in zip(rows, lengths, strict=True):
            owner = owners(text, length, num_segments)
            kept = (owner == index) | ((text[1] == 0) & (owner < index))
            parts.append(text[:, kept])
            own.append(owner[kept] == index)
        out.append(FlatRows.pad(parts, own))
    return out
