"""The EAGLE-3 draft layer on the CPU kernels: one call a pass, in bfloat16.

Responsible for building the layer's program. Knows nothing of chains, trees or commits; called by
`paceline.drafters.eagle3`. A drafted token costs little more than reading the layer once, which after the first pass of
a round is still in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.drafters.eagle3_layer import MAX_BEST, LayerOutput, LayerWeights, Rows, join_rows
from paceline.target import Device
from paceline.target.decoder_weights import group_major
from paceline.target.program import Epilogue, PackedWeight, Program, RowSegment, runs_on_kernels


def runs_natively(weights: LayerWeights, device: Device) -> bool:
    """Whether the kernels are here and take this layer."""
    return runs_on_kernels(
        device,
        weights.dtype,
        num_heads=weights.num_heads,
        num_kv_heads=weights.num_kv_heads,
        head_dim=weights.head_dim,
        widths=(weights.hidden, weights.target_hidden, weights.intermediate),
    )


@dataclass(frozen=True, slots=True)
class NativeOutput:
    """A pass of the native form; see :class:`paceline.drafters.eagle3_layer.LayerOutput`.

    Attributes:
        ranked: `[k, 2 * best]` int32: draft ids, then the bits of their log-probabilities.
    """

    states: Tensor
    logits: Tensor
    ranked: Tensor

    def best(self, count: int) -> tuple[list[list[float]], list[list[int]]]:
        """See :class:`paceline.drafters.eagle3_layer.LayerOutput`."""
        ids, bits = np.hsplit(self.ranked.numpy(), 2)
        return bits[:, :count].view(np.float32).tolist(), ids[:, :count].tolist()


class NativeEagle3Layer:
    """The layer as a program; see :class:`paceline.drafters.eagle3_layer.DraftLayer`."""

    def __init__(self, weights: LayerWeights) -> None:
        self.hidden, self.dtype = weights.hidden, weights.dtype
        self.num_kv_heads, self.head_dim = weights.num_kv_heads, weights.head_dim
        self.where = torch.device("cpu")
        self._draft_vocab = weights.draft_vocab
        weights.rope.cover(weights.max_positions)
        heads, kv_heads, dim = weights.num_heads, weights.num_kv_heads, weights.head_dim
        eps = weights.eps
        qkv, out = weights.qkv, weights.get("midlayer.self_attn.o_proj")
        qkv[: heads * dim] = group_major(qkv[: heads * dim], kv_heads, dim)
        out = group_major(out.t().contiguous(), kv_heads, dim).t()
        program = self._program = Program()
        self._states = program.buffer(weights.hidden, bound=True)
        self._out = program.buffer(weights.hidden, bound=True)
        self._logits = program.buffer(weights.draft_vocab, bound=True)
        self._num_best = min(MAX_BEST, weights.draft_vocab)
        self._best = program.buffer(2 * self._num_best, bound=True)
        embedded = program.buffer(weights.target_hidden)
        joined = program.buffer(weights.target_hidden + weights.hidden)
        mixed_in = program.buffer((heads + 2 * kv_heads) * dim)
        mixed = program.buffer(heads * dim)
        gated = program.buffer(weights.intermediate)
        asked = program.buffer(weights.hidden)
        program.embed(weights.embedding.contiguous(), embedded)
        program.norm(embedded, joined, weights.get("midlayer.input_layernorm"), eps)
        program.norm(
            self._states, joined, weights.get("midlayer.hidden_norm"), eps, offset=weights.target_hidden
        )
        program.linear(joined, mixed_in, PackedWeight.pack(qkv))
        program.attend(
            mixed_in,
            mixed,
            0,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            scale=weights.scale,
            rope=weights.rope.table,
        )
        program.linear(mixed, self._out, PackedWeight.pack(out), Epilogue.ADD, residual=self._states)
        program.linear(
            self._out,
            gated,
            PackedWeight.pack(weights.gate_up, is_gated=True),
            Epilogue.GATE_SILU,
            norm=weights.get("midlayer.post_attention_layernorm"),
            eps=eps,
        )
        program.linear(
            gated,
            self._out,
            PackedWeight.pack(weights.get("midlayer.mlp.down_proj")),
            Epilogue.ADD,
            residual=self._out,
        )
        program.gather(self._out, asked)
        program.linear(
            asked,
            self._logits,
            PackedWeight.pack(weights.get("lm_head")),
            Epilogue.STORE_FLOAT,
            norm=weights.get("norm"),
            eps=eps,
            selected=True,
        )
        program.top(self._logits, self._best, self._num_best)

    def forward(self, rows: Sequence[Rows], wanted: Sequence[int]) -> LayerOutput:
        """Run rows of several sequences; see :class:`paceline.drafters.eagle3_layer.DraftLayer`."""
        states = join_rows([part.states for part in rows]).contiguous()
        output = NativeOutput(
            torch.empty_like(states),
            torch.empty(len(wanted), self._draft_vocab),
            torch.empty(len(wanted), 2 * self._num_best, dtype=torch.int32),
        )
        segments = []
        for part in rows:
            slot = part.slot
            segments.append(RowSegment(slot.storage, part.num_rows, part.write_at, slot.length, part.paths))
            slot.num_pending += part.num_rows
        self._program.run(
            segments,
            [position for part in rows for position in part.positions],
            {
                self._states: states,
                self._out: output.states,
                self._logits: output.logits,
                self._best: output.ranked,
            },
            tokens=[token for part in rows for token in part.tokens],
            selected=wanted,
        )
        return output
