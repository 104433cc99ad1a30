"""A draft layer on the CPU kernels: one call a pass, in bfloat16.

Interprets :class:`paceline.draft_layer.LayerWeights` as a program: entry, blocks, head and likeliest tokens. It knows
no method, chain or commit. A drafted token costs little more than reading the layer once. After the first pass of a
round a small layer is still in the processor's cache. Where the head is the target's, a pass reads mostly the head: for
SmolLM2-135M 57 MB in bfloat16, the EAGLE-1 layer itself 9 MB. A pass reads the head once, for the rows whose tokens are
wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from paceline.cpu.block import BlockBuilder, PackedBlock, pack, takes_block
from paceline.cpu.growth import GrowingBuffers, Growth, grow
from paceline.cpu.operation import Epilogue
from paceline.cpu.packed_weight import PackedWeight
from paceline.cpu.program import Program
from paceline.cpu.row_segment import RowSegment, longest_of
from paceline.draft_layer.protocol import MAX_BEST, GrownTree, LayerOutput, Rows, TreeWanted, join_rows
from paceline.draft_layer.weights import Entry, LayerWeights, Residual
from paceline.model.device import Device
from paceline.model.projection import Projection


def takes_layer(weights: LayerWeights, device: Device) -> bool:
    """Whether the kernels are here and take this layer."""
    return takes_block(weights.shape, device, weights.dtype, [weights.entry.embedding.shape[1]])


@dataclass(frozen=True, slots=True)
class NativeOutput:
    """A pass of the native form; see :class:`paceline.draft_layer.LayerOutput`.

    Attributes:
        ranked: `[k, 2 * best]` int32: draft ids, then the bits of their log-probabilities.
    """

    states: Tensor
    logits: Tensor
    ranked: Tensor

    def best(self, count: int) -> tuple[list[list[float]], list[list[int]]]:
        """See :class:`paceline.draft_layer.LayerOutput`."""
        ranked = self.ranked.numpy()
        half = ranked.shape[1] // 2
        return ranked[:, half : half + count].view(np.float32).tolist(), ranked[:, :count].tolist()

    def with_states_of(self, rows: Sequence[int]) -> NativeOutput:
        """See :class:`paceline.draft_layer.LayerOutput`."""
        return self if len(rows) == len(self.states) else replace(self, states=self.states[list(rows)])


class NativeLayer:
    """A layer as a program; see :class:`paceline.draft_layer.DraftLayer`."""

    def __init__(self, weights: LayerWeights) -> None:
        shape = weights.shape
        self.hidden, self.dtype, self.where = shape.hidden, weights.dtype, torch.device("cpu")
        self.num_kv_heads, self.head_dim = shape.num_kv_heads, shape.head_dim
        self.values_are_keys = False
        self._draft_vocab = weights.head.shape[0]
        weights.rope.cover(weights.max_positions)
        program = self._program = Program()
        self._states = program.buffer(shape.hidden, bound=True) if weights.entry.reads_state else -1
        self._out = program.buffer(shape.hidden, bound=True)
        self._logits = program.buffer(self._draft_vocab, bound=True)
        self._num_best = min(MAX_BEST, self._draft_vocab)
        self._best = program.buffer(2 * self._num_best, bound=True)
        stream = program.buffer(shape.hidden) if weights.carries_norm else self._out
        read, residual = _add_entry(program, weights.entry, self._states, shape.hidden, shape.norm_eps)
        builder = BlockBuilder(program, shape)
        for layer, block in enumerate(weights.blocks):
            packed = PackedBlock.pack(block)
            builder.add(packed, layer, weights.rope.table, stream, read=read, residual=residual)
            read = residual = stream
        head_norm = weights.head_norm
        if weights.carries_norm:
            assert head_norm is not None
            program.norm(stream, self._out, head_norm, shape.norm_eps)
            head_norm = None
        selected = program.buffer(shape.hidden)
        program.gather(self._out, selected)
        head = PackedWeight.pack(weights.head)
        program.linear(
            selected,
            self._logits,
            head,
            Epilogue.STORE_FLOAT,
            norm=head_norm,
            eps=shape.norm_eps,
            selected=True,
        )
        program.top(self._logits, self._best, self._num_best)

    def forward(self, rows: Sequence[Rows], wanted: Sequence[int]) -> LayerOutput:
        """Run rows of several sequences; see :class:`paceline.draft_layer.DraftLayer`."""
        segments, positions, tokens, states = _describe(rows)
        output = self._output(len(positions), len(wanted))
        self._program.run(segments, positions, self._bound(states, output), tokens=tokens, selected=wanted)
        return output

    def grow(
        self,
        rows: Sequence[Rows],
        wanted: Sequence[int],
        trees: Sequence[TreeWanted],
        draft_ids: Tensor | None,
    ) -> tuple[NativeOutput | None, list[GrownTree]]:
        """Run rows and grow trees in one call; see :class:`paceline.draft_layer.TreeGrower`."""
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

    def _output(self, num_rows: int, num_wanted: int) -> NativeOutput:
        return NativeOutput(
            torch.empty(num_rows, self.hidden, dtype=self.dtype),
            torch.empty(num_wanted, self._draft_vocab),
            torch.empty(num_wanted, 2 * self._num_best, dtype=torch.int32),
        )

    def _bound(self, states: Tensor, output: NativeOutput) -> dict[int, Tensor]:
        bound = {self._out: output.states, self._logits: output.logits, self._best: output.ranked}
        return bound if self._states < 0 else bound | {self._states: states}


def _add_entry(program: Program, entry: Entry, states: int, hidden: int, eps: float) -> tuple[int, int]:
    """Add what comes before the first block: the buffer that attention reads, and the one its result is added to."""
    width = entry.embedding.shape[1]
    embedded = program.buffer(width)
    program.embed(entry.embedding.contiguous(), embedded)
    if not entry.reads_state:
        if entry.embedding_norm is None:
            return embedded, embedded
        normed = program.buffer(width)
        program.norm(embedded, normed, entry.embedding_norm, eps)
        return normed, normed
    if entry.join is not None:
        assert entry.residual is Residual.ENTERED
        # The product with both side by side is a sum of two, each with the norm of what it reads.
        of_embedding, of_state = (
            part.contiguous() for part in entry.join.weight.split([width, hidden], dim=1)
        )
        half, joined = program.buffer(hidden), program.buffer(hidden)
        with_bias = pack(Projection(of_embedding, entry.join.bias))
        program.linear(embedded, half, with_bias, norm=entry.embedding_norm, eps=eps)
        program.linear(
            states,
            joined,
            PackedWeight.pack(of_state),
            Epilogue.ADD,
            residual=half,
            norm=entry.state_norm,
            eps=eps,
        )
        return joined, joined
    assert entry.embedding_norm is not None
    assert entry.state_norm is not None
    joined = program.buffer(width + hidden)
    program.norm(embedded, joined, entry.embedding_norm, eps)
    program.norm(states, joined, entry.state_norm, eps, offset=width)
    if entry.residual is Residual.STATE:
        return joined, states
    normed = program.buffer(hidden)
    program.norm(states, normed, entry.state_norm, eps)
    return joined, normed


def _describe(rows: Sequence[Rows]) -> tuple[list[RowSegment], list[int], list[int], Tensor]:
    """Segments, positions, tokens and states of rows, which are pending from now on."""
    segments = []
    for part in rows:
        slot = part.slot
        past: int = slot.length
        paths: Sequence[Sequence[int]] | None = part.paths
        if part.sees_all:
            past, paths = part.write_at, [range(part.num_rows)] * part.num_rows
        segments.append(RowSegment(slot.storage, part.num_rows, part.write_at, past, paths))
        slot.num_pending += part.num_rows
    positions = [position for part in rows for position in part.positions]
    tokens = [token for part in rows for token in part.tokens]
    return segments, positions, tokens, join_rows([part.states for part in rows]).contiguous()
