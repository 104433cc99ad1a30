"""Keys and values of context rows on the CPU kernels: a program of products and cache writes, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.cpu.block import pack
from paceline.cpu.program import Program
from paceline.cpu.row_segment import RowSegment
from paceline.draft_layer.context import ContextRows, ContextWeights
from paceline.draft_layer.protocol import join_rows


class NativeContext:
    """The products as a program; see :class:`paceline.draft_layer.context.ContextWriter`."""

    def __init__(self, weights: ContextWeights) -> None:
        shape = weights.shape
        weights.rope.cover(weights.max_positions)
        program = self._program = Program()
        self._features = program.buffer(shape.hidden, bound=True)
        normed = program.buffer(shape.hidden)
        keys_values = program.buffer(2 * shape.num_kv_heads * shape.head_dim)
        unused = program.buffer(16)  # rows without queries attend into it
        program.norm(self._features, normed, weights.norm, shape.norm_eps)
        for layer, (projection, norm) in enumerate(zip(weights.keys_values, weights.key_norms, strict=True)):
            program.linear(normed, keys_values, pack(projection))
            program.attend(
                keys_values,
                unused,
                layer,
                num_heads=0,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                scale=shape.attention_scale,
                rope=weights.rope.table,
                qk_norm=norm,
                eps=shape.norm_eps,
            )

    def write(self, rows: Sequence[ContextRows]) -> None:
        """Write rows; see :class:`paceline.draft_layer.context.ContextWriter`."""
        segments: list[RowSegment] = []
        positions: list[int] = []
        for part in rows:
            first, count = part.slot.length, part.features.shape[0]
            # Without queries nothing is attended to. Paths of one row keep the kernel from scoring the rows before.
            own = [(row,) for row in range(first, first + count)]
            segments.append(RowSegment(part.slot.storage, count, first, past=0, paths=own))
            positions += range(first, first + count)
        features = join_rows([part.features for part in rows]).contiguous()
        self._program.run(segments, positions, {self._features: features})
