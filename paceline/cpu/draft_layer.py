"""A draft layer on the CPU kernels: one call a pass, in bfloat16.

Responsible for the program of a decoder block, the head behind it and the likeliest tokens; a method adds what comes
before. Knows nothing of chains, trees or commits; called by the methods' layers. A drafted token costs little more than
reading the layer once, which after the first pass of a round is still in the cache where it is small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.cpu.growth import GrowingBuffers, GrownTree, Growth, grow
from paceline.cpu.packed_weight import PackedWeight
from paceline.cpu.program import Epilogue, Program, RowSegment, longest_of, runs_on_kernels
from paceline.methods.decoder_block import BlockWeights
from paceline.methods.draft_layer import MAX_BEST, LayerOutput, Rows, TreeWanted, join_rows
from paceline.methods.upper_block import UpperWeights
from paceline.model.block import group_major
from paceline.model.device import Device

Enter = Callable[[Program, int], tuple[int, int]]
"""Adds what comes before the block, given the program and the buffer of the rows' states; returns the buffer that
attention reads and the one that its result is added to."""


def block_runs_natively(weights: BlockWeights, device: Device, widths: Sequence[int]) -> bool:
    """Whether the kernels are here and take this block, and rows of these widths."""
    return runs_on_kernels(
        device,
        weights.dtype,
        num_heads=weights.num_heads,
        num_kv_heads=weights.num_kv_heads,
        head_dim=weights.head_dim,
        widths=(weights.hidden, weights.intermediate, *widths),
    )


@dataclass(frozen=True, slots=True)
class NativeOutput:
    """A pass of the native form; see :class:`paceline.methods.draft_layer.LayerOutput`.

    Attributes:
        ranked: `[k, 2 * best]` int32: draft ids, then the bits of their log-probabilities.
    """

    states: Tensor
    logits: Tensor
    ranked: Tensor

    def best(self, count: int) -> tuple[list[list[float]], list[list[int]]]:
        """See :class:`paceline.methods.draft_layer.LayerOutput`."""
        ranked = self.ranked.numpy()
        half = ranked.shape[1] // 2
        return ranked[:, half : half + count].view(np.float32).tolist(), ranked[:, :count].tolist()


class NativeLayer:
    """A layer as a program; see :class:`paceline.methods.draft_layer.DraftLayer`.

    Args:
        weights: the block's.
        head: `[draft_vocab, hidden]`, in the block's type.
        head_norm: `[hidden]`, of the norm before the head, or None.
        enter: adds what comes before the block.
        upper: plain blocks above it.
        goes_on_from_norm: whether `states` are the output behind the norm before the head.
    """

    def __init__(
        self,
        weights: BlockWeights,
        head: Tensor,
        head_norm: Tensor | None,
        enter: Enter,
        upper: Sequence[UpperWeights] = (),
        goes_on_from_norm: bool = False,
    ) -> None:
        self.hidden, self.dtype = weights.hidden, weights.dtype
        self.num_kv_heads, self.head_dim = weights.num_kv_heads, weights.head_dim
        self.where = torch.device("cpu")
        self._draft_vocab = head.shape[0]
        weights.rope.cover(weights.max_positions)
        program = self._program = Program()
        self._states = program.buffer(weights.hidden, bound=True)
        self._out = program.buffer(weights.hidden, bound=True)
        self._logits = program.buffer(self._draft_vocab, bound=True)
        self._num_best = min(MAX_BEST, self._draft_vocab)
        self._best = program.buffer(2 * self._num_best, bound=True)
        read, residual = enter(program, self._states)
        stream = program.buffer(weights.hidden) if goes_on_from_norm else self._out
        self._add_block(weights, read, residual, stream)
        for layer, above in enumerate(upper, start=1):
            above.block.rope.cover(weights.max_positions)
            self._add_block(above.block, stream, stream, stream, layer, above.norm)
        if goes_on_from_norm:
            assert head_norm is not None
            program.norm(stream, self._out, head_norm, weights.eps)
            head_norm = None
        asked = program.buffer(weights.hidden)
        program.gather(self._out, asked)
        program.linear(
            asked,
            self._logits,
            PackedWeight.pack(head),
            Epilogue.STORE_FLOAT,
            norm=head_norm,
            eps=weights.eps,
            selected=True,
        )
        program.top(self._logits, self._best, self._num_best)

    def _add_block(
        self,
        weights: BlockWeights,
        read: int,
        residual: int,
        stream: int,
        layer: int = 0,
        norm: Tensor | None = None,
    ) -> None:
        """Attention of `read`, normed if a norm is given, added to `residual`, and the gated product, into `stream`."""
        program, heads, kv_heads, dim = (
            self._program, weights.num_heads, weights.num_kv_heads, weights.head_dim,
        )  # fmt: skip
        qkv, bias = weights.qkv.clone(), weights.qkv_bias
        qkv[: heads * dim] = group_major(qkv[: heads * dim], kv_heads, dim)
        if bias is not None:
            bias = bias.clone()
            bias[: heads * dim] = group_major(bias[: heads * dim], kv_heads, dim)
        out = group_major(weights.out.t().contiguous(), kv_heads, dim).t()
        mixed_in = program.buffer((heads + 2 * kv_heads) * dim)
        mixed = program.buffer(heads * dim)
        gated = program.buffer(weights.intermediate)
        program.linear(read, mixed_in, PackedWeight.pack(qkv, bias), norm=norm, eps=weights.eps)
        program.attend(
            mixed_in,
            mixed,
            layer,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            scale=weights.scale,
            rope=weights.rope.table,
            qk_norm=None if weights.head_norms is None else weights.head_norms.contiguous(),
            eps=weights.eps,
        )
        program.linear(mixed, stream, PackedWeight.pack(out), Epilogue.ADD, residual=residual)
        program.linear(
            stream,
            gated,
            PackedWeight.pack(weights.gate_up, is_gated=True),
            Epilogue.GATE_SILU,
            norm=weights.mlp_norm,
            eps=weights.eps,
        )
        program.linear(gated, stream, PackedWeight.pack(weights.down), Epilogue.ADD, residual=stream)

    def forward(self, rows: Sequence[Rows], wanted: Sequence[int]) -> LayerOutput:
        """Run rows of several sequences; see :class:`paceline.methods.draft_layer.DraftLayer`."""
        return self.run(*_describe(rows), wanted)

    def grow(
        self,
        rows: Sequence[Rows],
        wanted: Sequence[int],
        trees: Sequence[TreeWanted],
        draft_ids: Tensor | None,
    ) -> tuple[NativeOutput | None, list[GrownTree]]:
        """Run rows and grow trees in one call; see :class:`paceline.methods.draft_layer.TreeGrower`."""
        program, output, first = self._program, None, None
        if rows:
            segments, positions, tokens, states = _describe(rows)
            output = self._output(len(positions), len(wanted))
        growths = [self._growth(tree, output, wanted) for tree in trees]
        num_wide = sum(growth.width for growth in growths)
        longest = max(growth.past + growth.max_rows for growth in growths)
        if rows:
            longest = max(longest, longest_of(segments))
        program.reserve(max(num_wide, sum(part.num_rows for part in rows)), longest)
        if output is not None:
            first = program.describe(
                segments, positions, self._bound(states, output), tokens=tokens, selected=wanted
            )
        drafted = self._output(num_wide, num_wide)
        nothing = [0] * num_wide
        passes = program.describe(
            [],
            nothing,
            self._bound(torch.empty_like(drafted.states), drafted),
            tokens=nothing,
            selected=nothing,
        )
        buffers = GrowingBuffers(self._states, self._out, self._best, self._num_best)
        grown = grow(program, buffers, growths, passes, first=first, token_of=draft_ids)
        for tree, result in zip(trees, grown, strict=True):
            tree.slot.num_pending += len(result.row_nodes)
        return output, grown

    def _growth(self, tree: TreeWanted, output: NativeOutput | None, wanted: Sequence[int]) -> Growth:
        if isinstance(tree.root, int):
            assert output is not None
            place, row = tree.root, wanted[tree.root]
        else:
            assert isinstance(tree.root.output, NativeOutput)
            output, place, row = tree.root.output, tree.root.place, tree.root.row
        slot = tree.slot
        past = slot.length + slot.num_pending
        return Growth(
            slot.storage, past, tree.start - 2, tree.depth, tree.width, tree.branch,
            ranked=output.ranked[place], state=output.states[row],
        )  # fmt: skip

    def run(
        self,
        segments: Sequence[RowSegment],
        positions: Sequence[int],
        tokens: Sequence[int],
        states: Tensor,
        wanted: Sequence[int],
    ) -> NativeOutput:
        """Run rows, whatever they see.

        Args:
            segments: rows of each sequence, in row order.
            positions: of the rows.
            tokens: of the rows.
            states: `[n, hidden]`, dense.
            wanted: rows whose logits are wanted.
        """
        output = self._output(states.shape[0], len(wanted))
        self._program.run(segments, positions, self._bound(states, output), tokens=tokens, selected=wanted)
        return output

    def _output(self, num_rows: int, num_wanted: int) -> NativeOutput:
        return NativeOutput(
            torch.empty(num_rows, self.hidden, dtype=self.dtype),
            torch.empty(num_wanted, self._draft_vocab),
            torch.empty(num_wanted, 2 * self._num_best, dtype=torch.int32),
        )

    def _bound(self, states: Tensor, output: NativeOutput) -> dict[int, Tensor]:
        return {
            self._states: states,
            self._out: output.states,
            self._logits: output.logits,
            self._best: output.ranked,
        }


def _describe(rows: Sequence[Rows]) -> tuple[list[RowSegment], list[int], list[int], Tensor]:
    """Segments, positions, tokens and states of rows, which are pending from now on."""
    segments = []
    for part in rows:
        slot = part.slot
        segments.append(RowSegment(slot.storage, part.num_rows, part.write_at, slot.length, part.paths))
        slot.num_pending += part.num_rows
    positions = [position for part in rows for position in part.positions]
    tokens = [token for part in rows for token in part.tokens]
    return segments, positions, tokens, join_rows([part.states for part in rows]).contiguous()
