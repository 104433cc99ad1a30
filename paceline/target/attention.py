"""Attention of one step's rows over their sequences' caches.

Responsible for positions, visibility (causal chains, trees, sliding windows) and the attention product, per
sequence. It does not know layers' weights or where queries come from. Built once per step by the engine
(`StepPlan`), used by each layer of either executor.

Query heads that share a key head are folded into the row axis, so keys and values are read once and never
repeated: queries come as `[n, group, num_kv_heads, head_dim]`, group-major, and leave in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.target.kv_cache import Slot

# From this many query rows (after folding) on, groups are run one by one: their causal form needs no mask.
MAX_FOLDED_ROWS = 256


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

    def is_plain_causal(self, window: int | None) -> bool:
        """A chain from an empty cache, shorter than the window: visibility is the lower triangle."""
        return self.parents is None and self.past == 0 and (window is None or self.num_rows <= window)

    def mask(self, window: int | None, group: int, dtype: torch.dtype) -> Tensor | None:
        """Additive mask `[1, 1, num_rows * group, total - first_visible]`; None when all is visible."""
        key = (window, group)
        if key not in self._masks:
            self._masks[key] = self._build_mask(window, group, dtype)
        return self._masks[key]

    def _build_mask(self, window: int | None, group: int, dtype: torch.dtype) -> Tensor | None:
        if self.num_rows == 1:
            return None
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
            depths = torch.tensor(self.depths)
            key_positions = torch.cat([torch.arange(first, self.past), depths + self.past])
            visible &= (depths + self.past)[:, None] - key_positions[None, :] < window
        mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
        return mask.repeat_interleave(group, dim=0)[None, None].to(self.slot.layout.device)


@dataclass(slots=True)
class StepPlan:
    """Everything about a step that every layer needs.

    Attributes:
        tokens: `[num_rows]` int64.
        positions: `[num_rows]` int64, explicit.
        segments: one per sequence, covering rows in order; padding rows after them belong to none.
        capture: layers whose incoming residual stream is wanted (`num_layers`: after the last).
        logit_rows: `[k]` int64 rows to run through the head, or None for all.
    """

    tokens: Tensor
    positions: Tensor
    segments: Sequence[Segment]
    capture: frozenset[int]
    logit_rows: Tensor | None

    @property
    def num_rows(self) -> int:
        """Rows, padding included."""
        return int(self.tokens.shape[0])


def attend(
    queries: Tensor,
    keys_values: Tensor,
    layer: int,
    plan: StepPlan,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Store a layer's new keys and values, then attend each sequence over its own cache.

    Args:
        queries: `[n, group, num_kv_heads, head_dim]`, rotated.
        keys_values: `[n, 2 * num_kv_heads, head_dim]`, keys rotated, keys first.
        layer: layer index in the cache.
        plan: the step.
        scale: factor on the scores.
        window: sliding window in tokens, the row itself included.
        softcap: cap scores with `softcap * tanh(score / softcap)`.

    Returns:
        `[n, group * num_kv_heads * head_dim]`; padding rows hold zeros.
    """
    segments = plan.segments
    if len(segments) == 1 and segments[0].num_rows == queries.shape[0]:
        return _attend_segment(queries, keys_values, layer, segments[0], scale, window, softcap)
    outputs = []
    for segment in segments:
        end = segment.first_row + segment.num_rows
        outputs.append(
            _attend_segment(
                queries[segment.first_row : end],
                keys_values[segment.first_row : end],
                layer,
                segment,
                scale,
                window,
                softcap,
            )
        )
    covered = segments[-1].first_row + segments[-1].num_rows
    if covered < queries.shape[0]:
        outputs.append(outputs[0].new_zeros((queries.shape[0] - covered, outputs[0].shape[1])))
    return torch.cat(outputs)


def _attend_segment(
    queries: Tensor,
    keys_values: Tensor,
    layer: int,
    segment: Segment,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    n, group, num_kv_heads, head_dim = queries.shape
    slot = segment.slot
    slot.append(layer, segment.past, keys_values)
    keys, values = slot.view(layer, segment.first_visible(window), segment.total)
    if softcap is None and n * group > MAX_FOLDED_ROWS:
        causal = segment.is_plain_causal(window)
        mask = None if causal else segment.mask(window, 1, queries.dtype)
        by_group = [
            F.scaled_dot_product_attention(
                queries[:, g].transpose(0, 1).unsqueeze(0),
                keys,
                values,
                attn_mask=mask,
                is_causal=causal,
                scale=scale,
            )
            for g in range(group)
        ]  # each [1, num_kv_heads, n, head_dim]
        return torch.cat(by_group).permute(2, 0, 1, 3).reshape(n, -1)
    folded = queries.reshape(1, n * group, num_kv_heads, head_dim).transpose(1, 2)
    mask = segment.mask(window, group, queries.dtype)
    if softcap is None:
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
    else:
        scores = torch.tanh(folded @ keys.transpose(-1, -2) * (scale / softcap)) * softcap
        if mask is not None:
            scores = scores + mask
        weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        out = weights.to(values.dtype) @ values
    return out.transpose(1, 2).reshape(n, -1)
