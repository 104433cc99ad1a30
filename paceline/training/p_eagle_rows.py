"""The rows that P-EAGLE learns from: which there are, who sees whom, and how they fall into segments (2602.01469).

Responsible for conditional drop-token sampling, the attention pattern over the flat list of rows and sequence
partitioning. Pure functions and a table; knows no weights. Called by :mod:`paceline.training.p_eagle`.

A row is an *anchor*, the last true position it knows, and a *depth*: how many positions behind the anchor it stands.
Its position is their sum. Rows of depth 0 are made of true features; all others are mask rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_TABLE_POSITIONS = 1024  # [8192, 8192] bool are 64 MiB; longer texts evaluate the pattern pair by pair


def sample_rows(in_loss: Tensor, num_depths: int, keep_ratio: float, keep_floor: float) -> Tensor:
    """Conditional drop-token sampling: every true position, and of each depth ``keep_ratio`` of the depth before.

    A row of depth ``d`` is drawn only among the successors of rows kept at depth ``d - 1``, so that the whole chain
    behind every kept row is there. Draws from torch's global random state, which a checkpoint of a run holds.

    Args:
        in_loss: bool ``[length]``: positions whose rows have a target.
        num_depths: depths, the true rows included.
        keep_ratio: rows of depth ``d`` are about ``length * keep_ratio ** d``.
        keep_floor: least such share.

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
    """Every depth of every anchor whose position lies within the text: int64 ``[2, rows]``."""
    depth, anchor = torch.meshgrid(torch.arange(num_depths), torch.arange(length), indexing="ij")
    fits = anchor + depth < length
    return torch.stack([anchor[fits], depth[fits]])


def may_see(query: Tensor, key: Tensor) -> Tensor:
    """Who sees whom, bool ``[queries, keys]``: true rows up to one's anchor, and one's own chain up to oneself.

    Args:
        query: anchors and depths ``[2, queries]``.
        key: anchors and depths ``[2, keys]``.
    """
    anchor, depth = query.unsqueeze(-1)
    key_anchor, key_depth = key.unsqueeze(1)
    seen: Tensor = ((key_depth == 0) & (key_anchor <= anchor)) | (
        (key_anchor == anchor) & (key_depth <= depth)
    )
    return seen


class MaskTable:
    """The attention pattern of every row of a text, built once; what a batch needs is gathered from it.

    Rows lie by anchor, then by depth, so that the pattern of a shorter text is the table's top left block.

    Args:
        num_depths: depths, the true rows included.
    """

    def __init__(self, num_depths: int) -> None:
        self._num_depths = num_depths
        self._num_positions = 0
        self._table = torch.zeros(0, 0, dtype=torch.bool)

    def gather(self, rows: Tensor) -> Tensor:
        """Who sees whom among ``rows`` ``[2, n]``: bool ``[n, n]``."""
        longest = int(rows[0].max()) + 1
        if longest > MAX_TABLE_POSITIONS:
            return may_see(rows, rows)
        if longest > self._num_positions:
            self._num_positions = min(MAX_TABLE_POSITIONS, max(longest, 2 * self._num_positions))
            anchor = torch.arange(self._num_positions).repeat_interleave(self._num_depths)
            depth = torch.arange(self._num_depths).repeat(self._num_positions)
            every = torch.stack([anchor, depth])
            self._table = may_see(every, every)
        place = rows[0] * self._num_depths + rows[1]
        seen: Tensor = self._table[place][:, place]
        return seen


def owners(rows: Tensor, length: int, num_segments: int) -> Tensor:
    """Segment of each row, int64 ``[n]``: true rows by position, a mask row by the position of its chain's first."""
    anchor, depth = rows
    owner: Tensor = (anchor + (depth > 0)) * num_segments // length
    return owner.clamp_max(num_segments - 1)


@dataclass(frozen=True, slots=True)
class FlatRows:
    """Rows of several texts, padded behind.

    Attributes:
        anchors: int64 ``[texts, n]``.
        depths: int64 ``[texts, n]``.
        is_own: bool ``[texts, n]``: rows with a loss, neither padding nor context of another segment.
        visible: bool ``[texts, n, n]``: who sees whom; nobody sees padding.
    """

    anchors: Tensor
    depths: Tensor
    is_own: Tensor
    visible: Tensor

    @property
    def positions(self) -> Tensor:
        """Where each row stands, ``[texts, n]``."""
        return self.anchors + self.depths

    @classmethod
    def pad(cls, rows: Sequence[Tensor], is_own: Sequence[Tensor], table: MaskTable) -> FlatRows:
        """Put texts side by side.

        Args:
            rows: anchors and depths ``[2, n]`` of each text, the first position's true row first.
            is_own: bool ``[n]`` of each text.
            table: of at least as many depths.
        """
        room = max(part.shape[1] for part in rows)
        padded = torch.zeros(2, len(rows), room, dtype=torch.int64)
        own = torch.zeros(len(rows), room, dtype=torch.bool)
        visible = torch.zeros(len(rows), room, room, dtype=torch.bool)
        for index, (part, part_own) in enumerate(zip(rows, is_own, strict=True)):
            count = part.shape[1]
            padded[:, index, :count] = part
            own[index, :count] = part_own
            visible[index, :count, :count] = table.gather(part)
            visible[index, count:, 0] = True  # padding sees something, so that its softmax is defined
        return cls(padded[0], padded[1], own, visible)


def segments(
    rows: Sequence[Tensor], lengths: Sequence[int], num_segments: int, table: MaskTable
) -> list[FlatRows]:
    """Partition texts (Algorithm 1): each segment's own rows, and all true rows before them as context.

    A mask row sees only its own chain and true rows up to its anchor, and both lie in its segment or are its context.
    So the sum of the segments' losses is the whole's, and so are its gradients.
    """
    out = []
    for index in range(num_segments):
        parts, own = [], []
        for text, length in zip(rows, lengths, strict=True):
            owner = owners(text, length, num_segments)
            kept = (owner == index) | ((text[1] == 0) & (owner < index))
            parts.append(text[:, kept])
            own.append(owner[kept] == index)
        out.append(FlatRows.pad(parts, own, table))
    return out
