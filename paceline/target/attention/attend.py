"""Attention of one step's rows over their sequences' caches.

A step plan holds positions and visibility (causal chains, trees, sliding windows) and runs the attention product. The
engine builds one plan per step, and every layer of every executor uses it. This file does not know weights or where
queries come from.

Query heads that share a key head are folded into the row axis, so that keys and values are read once and never
repeated. Queries come as `[n, group, num_kv_heads, head_dim]`, group-major, and the result has the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.model.torch_block import Scoring
from paceline.target.kv.slot import Slot

# With more query rows than this (after folding), groups run one by one: their causal form needs no mask.
MAX_FOLDED_ROWS = 256


class Unit(Protocol):
    """Consecutive rows of a step that are attended in one call: one sequence, or several neighbours."""

    @property
    def first_row(self) -> int:
        """Its first row in the flattened step."""

    @property
    def num_rows(self) -> int:
        """Its rows."""

    def attend(self, queries: Tensor, keys_values: Tensor, layer: int, scoring: Scoring) -> Tensor:
        """Store its keys and values and attend; see `StepPlan.attend`, for this unit's rows alone."""


@dataclass(slots=True)
class Segment:
    """The rows of one sequence in a step.

    Attributes:
        slot: where its keys and values live.
        first_row: its first row in the flattened step.
        num_rows: rows in this step.
        past: cached rows before this step.
        parents: parent row of each row, -1 for the cached prefix; None for a chain.
        depths: depth of each row below the prefix (row 0 of a chain has 0).
    """

    slot: Slot
    first_row: int
    num_rows: int
    past: int
    parents: tuple[int, ...] | None
    depths: tuple[int, ...]
    _masks: dict[tuple[int | None, int], Tensor | None] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Cached rows, this step's included."""
        return self.past + self.num_rows

    def first_visible(self, window: int | None) -> int:
        """First cached row that any row of this step may see."""
        return 0 if window is None else max(0, self.past - window + 1)

    def visible(self, window: int | None) -> Tensor:
        """Who sees whom: bool `[num_rows, total - first_visible]`."""
        n, first = self.num_rows, self.first_visible(window)
        visible = torch.ones((n, self.total - first), dtype=torch.bool)
        own = visible[:, self.past - first :]  # [n, n]: this step's rows
        if self.parents is None:
            own.tril_()
        else:
            own.zero_()
            for row, parent in enumerate(self.parents):
                if parent >= 0:
                    own[row] = own[parent]
                own[row, row] = True
        if window is not None:
            positions = torch.tensor(self.depths) + self.past
            key_positions = torch.cat([torch.arange(first, self.past), positions])
            visible &= positions[:, None] - key_positions[None, :] < window
        return visible

    def _is_plain_causal(self, window: int | None) -> bool:
        """A chain from an empty cache, shorter than the window: visibility is the lower triangle."""
        return self.parents is None and self.past == 0 and (window is None or self.num_rows <= window)

    def _mask(self, window: int | None, group: int, dtype: torch.dtype) -> Tensor | None:
        """Additive mask `[1, 1, num_rows * group, total - first_visible]`; None when all is visible."""
        key = (window, group)
        if key not in self._masks:
            mask = None
            if self.num_rows > 1:
                mask = additive(self.visible(window), dtype).repeat_interleave(group, dim=0)[None, None]
                mask = mask.to(self.slot.layout.device)
            self._masks[key] = mask
        return self._masks[key]

    def attend(self, queries: Tensor, keys_values: Tensor, layer: int, scoring: Scoring) -> Tensor:
        """Store its keys and values and attend over its own cache."""
        n, group, num_kv_heads, head_dim = queries.shape
        window = scoring.window
        self.slot.append(layer, self.past, keys_values)
        keys, values = self.slot.view(layer, self.first_visible(window), self.total)
        if scoring.softcap is None and n * group > MAX_FOLDED_ROWS:
            return self._attend_by_group(queries, keys, values, scoring)
        folded = queries.reshape(1, n * group, num_kv_heads, head_dim).transpose(1, 2)
        mixed = product(folded, keys, values, self._mask(window, group, queries.dtype), scoring)
        return mixed.transpose(1, 2).reshape(n, -1)

    def _attend_by_group(self, queries: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
        """Long chunks: one call for each member of the head groups, without a mask where visibility is causal."""
        causal = self._is_plain_causal(scoring.window)
        mask = None if causal else self._mask(scoring.window, 1, queries.dtype)
        by_group = [
            F.scaled_dot_product_attention(
                queries[:, member].transpose(0, 1).unsqueeze(0),
                keys,
                values,
                attn_mask=mask,
                is_causal=causal,
                scale=scoring.scale,
            )
            for member in range(queries.shape[1])
        ]  # each [1, num_kv_heads, n, head_dim]
        return torch.cat(by_group).permute(2, 0, 1, 3).reshape(queries.shape[0], -1)


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Zero where visible, minus infinity elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))


def product(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """Softmax attention, `[b, h, rows, dim]` over `[b, h, keys, dim]`."""
    if scoring.softcap is None:
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scoring.scale)
    scores = (
        torch.tanh(queries @ keys.transpose(-1, -2) * (scoring.scale / scoring.softcap)) * scoring.softcap
    )
    if mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return weights.to(values.dtype) @ values


@dataclass(slots=True)
class StepPlan:
    """Everything about a step that every layer needs.

    Attributes:
        tokens: `[num_rows]` int64.
        positions: `[num_rows]` int64, explicit.
        max_position: the largest of them.
        segments: the rows of each sequence, in order; padding rows after them belong to none.
        units: the segments, with neighbours joined where the executor gains from that.
        capture: layers whose incoming residual stream is wanted (`num_layers`: after the last).
        logit_rows: `[k]` int64 rows to run through the head, or None for all.
        added: `[num_rows, hidden]` to add to the input embeddings, in any float type; None adds nothing.
    """

    tokens: Tensor
    positions: Tensor
    max_position: int
    segments: Sequence[Segment]
    units: Sequence[Unit]
    capture: frozenset[int]
    logit_rows: Tensor | None
    added: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Rows, padding included."""
        return int(self.tokens.shape[0])

    def attend(self, queries: Tensor, keys_values: Tensor, layer: int, scoring: Scoring) -> Tensor:
        """Attention of a block's rows; see :class:`paceline.model.torch_block.Attention`. Padding rows get zeros."""
        units, num_rows = self.units, queries.shape[0]
        if len(units) == 1 and units[0].num_rows == num_rows:
            return units[0].attend(queries, keys_values, layer, scoring)
        outputs = []
        for unit in units:
            first, end = unit.first_row, unit.first_row + unit.num_rows
            outputs.append(unit.attend(queries[first:end], keys_values[first:end], layer, scoring))
        covered = units[-1].first_row + units[-1].num_rows
        if covered < num_rows:
            outputs.append(outputs[0].new_zeros((num_rows - covered, outputs[0].shape[1])))
        return torch.cat(outputs)
