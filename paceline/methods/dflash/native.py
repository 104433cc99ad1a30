"""DFlash's layers on the CPU kernels, in bfloat16; see `native_layer.py`.

Two programs: one writes keys and values of new context rows, of every layer, and nothing else; the other runs blocks,
whose rows see the context and all of their own block. A block of eight rows costs little more than reading the layers
once. Called by `paceline.methods.one_pass.block_drafter`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.cpu.draft_layer import NativeLayer, NativeOutput, block_runs_natively
from paceline.cpu.packed_weight import PackedWeight
from paceline.cpu.program import Program, RowSegment
from paceline.methods.dflash.layer import BlockPlan, BlockRows, DFlashWeights
from paceline.methods.draft_layer import LayerOutput, join_rows
from paceline.methods.upper_block import UpperWeights
from paceline.target import Device


def runs_natively(weights: DFlashWeights, device: Device) -> bool:
    """Whether the kernels are here and take this checkpoint."""
    return all(block_runs_natively(block, device, ()) for block in weights.blocks)


class ContextProgram:
    """Keys and values of context rows, in every layer."""

    def __init__(self, weights: DFlashWeights) -> None:
        block = weights.blocks[0]
        program = self._program = Program()
        self._features = program.buffer(block.hidden, bound=True)
        normed = program.buffer(block.hidden)
        key_value = program.buffer(2 * block.num_kv_heads * block.head_dim)
        unused = program.buffer(16)  # what rows without queries attend into
        program.norm(self._features, normed, weights.context_norm, block.eps)
        for layer, block in enumerate(weights.blocks):
            block.rope.cover(block.max_positions)
            split, bias = block.num_heads * block.head_dim, block.qkv_bias
            packed = PackedWeight.pack(block.qkv[split:], None if bias is None else bias[split:])
            norms = None if block.head_norms is None else block.head_norms[block.num_heads :].contiguous()
            program.linear(normed, key_value, packed)
            program.attend(
                key_value,
                unused,
                layer,
                num_heads=0,
                num_kv_heads=block.num_kv_heads,
                head_dim=block.head_dim,
                scale=block.scale,
                rope=block.rope.table,
                qk_norm=norms,
                eps=block.eps,
            )

    def run(self, rows: Sequence[BlockRows]) -> None:
        """Write context rows behind each slot's length."""
        segments: list[RowSegment] = []
        positions: list[int] = []
        for part in rows:
            first, count = part.slot.length, part.context.shape[0]
            # Without queries nothing is attended to; that each row sees itself alone spares the kernel the way there.
            own = [(row,) for row in range(first, first + count)]
            segments.append(RowSegment(part.slot.storage, count, first, past=0, paths=own))
            positions += range(first, first + count)
        features = join_rows([part.context for part in rows]).contiguous()
        self._program.run(segments, positions, {self._features: features})


class NativeDFlashLayer:
    """The layers as programs; see :class:`paceline.methods.dflash.layer.BlockLayer`."""

    def __init__(self, weights: DFlashWeights, plan: BlockPlan) -> None:
        block, norm = weights.blocks[0], weights.norms[0]
        self.hidden, self.dtype = block.hidden, block.dtype
        self.num_kv_heads, self.head_dim = block.num_kv_heads, block.head_dim
        self.where = torch.device("cpu")
        self.num_layers = len(weights.blocks)
        self.plan = plan

        def enter(program: Program, _: int) -> tuple[int, int]:
            embedded, read = program.buffer(block.hidden), program.buffer(block.hidden)
            program.embed(weights.embedding.contiguous(), embedded)
            program.norm(embedded, read, norm, block.eps)
            return read, embedded

        upper = [UpperWeights(*pair) for pair in zip(weights.norms[1:], weights.blocks[1:], strict=True)]
        self._blocks = NativeLayer(
            block, weights.head, weights.final_norm, enter, upper, goes_on_from_norm=True
        )
        self._context = ContextProgram(weights)

    def forward(self, rows: Sequence[BlockRows]) -> LayerOutput:
        """Run a block for each of several sequences; see :class:`paceline.methods.dflash.layer.BlockLayer`."""
        if fresh := [part for part in rows if part.context.shape[0]]:
            self._context.run(fresh)
        size = self.plan.size
        masks, everything = [self.plan.mask_token] * (size - 1), [range(size)] * size
        segments: list[RowSegment] = []
        tokens: list[int] = []
        positions: list[int] = []
        for part in rows:
            first = part.slot.length + part.context.shape[0]
            segments.append(RowSegment(part.slot.storage, size, first, first, everything))
            tokens += [part.anchor, *masks]
            positions += range(first, first + size)
        asked = [i * size + row for i in range(len(rows)) for row in range(size - self.plan.num_drafts, size)]
        nothing = torch.empty(len(tokens), self.hidden, dtype=self.dtype)  # rows begin at embeddings
        output = self._blocks.run(segments, positions, tokens, nothing, asked)
        states: Tensor = output.states if len(asked) == len(tokens) else output.states[asked]
        return NativeOutput(states, output.logits, output.ranked)
