"""A draft layer in torch operators: the backend that runs everywhere.

Interprets :class:`paceline.draft_layer.LayerWeights` with the target's own parts: packed products, rotary tables and
key-value slots. It knows no method, chain, tree or commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.draft_layer.protocol import LayerOutput, Rows, join_rows
from paceline.draft_layer.weights import Entry, LayerWeights, Residual
from paceline.model.device import Device
from paceline.model.norm import RmsNorm
from paceline.model.torch_block import Scoring, TorchBlock
from paceline.target.attention.attend import MAX_FOLDED_ROWS, product


@dataclass(frozen=True, slots=True)
class TorchOutput:
    """A pass in torch operators; see :class:`paceline.draft_layer.LayerOutput`."""

    states: Tensor
    logits: Tensor

    def best(self, count: int) -> tuple[list[list[float]], list[list[int]]]:
        """See :class:`paceline.draft_layer.LayerOutput`."""
        log_probs, ids = self.logits.log_softmax(-1).topk(count, dim=-1)
        return log_probs.tolist(), ids.tolist()

    def with_states_of(self, rows: Sequence[int]) -> TorchOutput:
        """See :class:`paceline.draft_layer.LayerOutput`."""
        return self if len(rows) == len(self.states) else TorchOutput(self.states[list(rows)], self.logits)


class SlotAttention:
    """Attention of rows over their sequences' cache slots; see :class:`paceline.model.torch_block.Attention`.

    Keys and values are written behind each slot's settled and pending rows.

    Args:
        rows: one sequence's rows each.
        first_row: rows of a slot before this one hold nothing in the layers that are run, and only they see themselves.
    """

    def __init__(self, rows: Sequence[Rows], first_row: int = 0) -> None:
        self._rows = rows
        self._first_row = first_row
        self._masks: dict[tuple[int, int], Tensor | None] = {}  # by sequence and group

    def __call__(self, queries: Tensor, keys_values: Tensor, layer: int, scoring: Scoring) -> Tensor:
        mixed, first = [], 0
        _, group, num_kv_heads, head_dim = queries.shape
        for index, part in enumerate(self._rows):
            n, used = part.num_rows, part.write_at
            part.slot.append(layer, used, keys_values[first : first + n])
            keys, values = part.slot.view(layer, 0, used + n)
            if num_kv_heads == 1 and n * group > MAX_FOLDED_ROWS:
                mixed.append(self._spread(queries[first : first + n], keys, values, index, scoring))
                first += n
                continue
            # Query heads that share a key head become rows of it, so that keys are read once.
            folded = queries[first : first + n].reshape(1, n * group, num_kv_heads, head_dim).transpose(1, 2)
            out = product(folded, keys, values, self._mask(index, group, queries), scoring)
            mixed.append(out.transpose(1, 2).reshape(n, -1))
            first += n
        return join_rows(mixed)

    def _spread(self, queries: Tensor, keys: Tensor, values: Tensor, index: int, scoring: Scoring) -> Tensor:
        """Many rows on one key head: each query head by itself, so that the mask is not repeated for every head."""
        n, group = queries.shape[:2]
        shape = (-1, group, -1, -1)
        by_head = queries.transpose(0, 2)[0].unsqueeze(0)  # [1, group, n, head_dim]
        mask = self._mask(index, 1, queries)
        out = product(by_head, keys.expand(shape), values.expand(shape), mask, scoring)
        return out.transpose(1, 2).reshape(n, -1)

    def _mask(self, index: int, group: int, like: Tensor) -> Tensor | None:
        """Additive `[n * group, rows in the slot + n]`, or None where everything is visible."""
        key = index, group
        if key not in self._masks:
            mask = self._visible(self._rows[index], like)
            self._masks[key] = None if mask is None else mask.repeat_interleave(group, dim=0)
        return self._masks[key]

    def _visible(self, part: Rows, like: Tensor) -> Tensor | None:
        n, used, settled, first_row = part.num_rows, part.write_at, part.slot.length, self._first_row
        if part.sees_all or (part.paths is None and n == 1 and not first_row):
            return None
        if part.paths is None:
            mask = like.new_full((n, used + n), -torch.inf).triu(used + 1)
            mask[:, :first_row] = -torch.inf
            mask.diagonal(used).zero_()
            return mask
        mask = torch.full((n, used + n), -torch.inf, dtype=like.dtype)
        mask[:, first_row:settled] = 0.0
        for row, path in enumerate(part.paths):
            own = settled + path[-1]
            mask[row, [at for seen in path if (at := settled + seen) >= first_row or at == own]] = 0.0
        return mask.to(like.device)


class TorchEntry:
    """An entry in torch operators; see :class:`paceline.draft_layer.weights.Entry`."""

    def __init__(self, weights: Entry, device: Device, dtype: torch.dtype, eps: float) -> None:
        where = device.torch_device

        def norm(weight: Tensor | None) -> RmsNorm | None:
            return None if weight is None else RmsNorm(weight.to(where, dtype), eps)

        self._embedding = weights.embedding.to(where)
        self._embedding_norm, self._state_norm = norm(weights.embedding_norm), norm(weights.state_norm)
        self._join = None if weights.join is None else device.pack(weights.join.weight, weights.join.bias)
        self._reads_state, self._residual = weights.reads_state, weights.residual

    def forward(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads `[n, read_width]`, and what its result is added to `[n, hidden]`."""
        embedded = F.embedding(tokens, self._embedding)
        if self._embedding_norm is not None:
            embedded = self._embedding_norm(embedded)
        if not self._reads_state:
            return embedded, embedded
        normed = states if self._state_norm is None else self._state_norm(states)
        joined = torch.cat((embedded, normed), dim=-1)
        entered = joined if self._join is None else self._join(joined)
        if self._residual is Residual.ENTERED:
            return entered, entered
        return entered, states if self._residual is Residual.STATE else normed


class TorchStack:
    """An entry and the blocks behind it, without a head.

    Args:
        weights: of the layer.
        device: where it runs.
        first_layer: layer of the cache slots that the first block uses.
        first_row: see :class:`SlotAttention`.
    """

    def __init__(
        self, weights: LayerWeights, device: Device, first_layer: int = 0, first_row: int = 0
    ) -> None:
        eps, dtype, where = weights.shape.norm_eps, weights.dtype, device.torch_device
        self.where, self._rope, self._first_row = where, weights.rope, first_row
        self._entry = TorchEntry(weights.entry, device, dtype, eps)
        self._reads_entry = weights.entry.residual is not Residual.ENTERED
        self._blocks = [
            TorchBlock(block, device, dtype, layer) for layer, block in enumerate(weights.blocks, first_layer)
        ]
        norm = weights.head_norm
        self._head_norm = None if norm is None else RmsNorm(norm.to(where, dtype), eps)

    def forward(self, rows: Sequence[Rows], states: Tensor) -> Tensor:
        """Run rows of several sequences, which become pending by the caller; gives `[n, hidden]`, not normed.

        Args:
            rows: one sequence's rows each.
            states: `[n, hidden]`, of all rows.
        """
        tokens = torch.tensor([token for part in rows for token in part.tokens], device=self.where)
        positions = [position for part in rows for position in part.positions]
        rope = self._rope.gather(torch.tensor(positions, device=self.where), max(positions))
        read, stream = self._entry.forward(tokens, states)
        attention = SlotAttention(rows, self._first_row)
        for index, block in enumerate(self._blocks):
            is_read = index == 0 and self._reads_entry
            stream = block.forward(stream, rope, attention, read=read if is_read else None)
        return stream

    def norm(self, stream: Tensor) -> Tensor:
        """The norm before the head, where there is one."""
        return stream if self._head_norm is None else self._head_norm(stream)


class TorchLayer:
    """A stack with its head; see :class:`paceline.draft_layer.DraftLayer`."""

    def __init__(self, weights: LayerWeights, device: Device) -> None:
        shape = weights.shape
        self.hidden, self.dtype, self.where = shape.hidden, weights.dtype, device.torch_device
        self.num_kv_heads, self.head_dim = shape.num_kv_heads, shape.head_dim
        self.values_are_keys = shape.latent is not None
        self._stack = TorchStack(weights, device)
        self._carries_norm = weights.carries_norm
        self._head = device.pack(weights.head)

    def forward(self, rows: Sequence[Rows], wanted: Sequence[int]) -> LayerOutput:
        """Run rows of several sequences; see :class:`paceline.draft_layer.DraftLayer`."""
        states = self._stack.forward(rows, join_rows([part.states for part in rows]))
        if self._carries_norm:
            states = self._stack.norm(states)
        for part in rows:
            part.slot.num_pending += part.num_rows
        selected = states if len(wanted) == states.shape[0] else states[list(wanted)]
        logits = self._head(selected if self._carries_norm else self._stack.norm(selected))
        return TorchOutput(states, logits.float())
