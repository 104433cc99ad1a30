"""A decoder block on the CPU kernels: its weights in panels, and the operations that run it.

The target's executor and the drafters' layers add blocks to their programs through this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.cpu import kernels
from paceline.cpu.operation import Epilogue
from paceline.cpu.packed_weight import PackedWeight
from paceline.cpu.program import Program
from paceline.cpu.workspace import MAX_GROUP
from paceline.model.block import BlockShape, BlockWeights
from paceline.model.device import Device
from paceline.model.projection import Projection

MAX_HEAD_DIM = 256
GATES = {"silu": Epilogue.GATE_SILU, "gelu_pytorch_tanh": Epilogue.GATE_GELU}


def takes_block(shape: BlockShape, device: Device, dtype: torch.dtype, widths: Sequence[int] = ()) -> bool:
    """Whether the kernels are built, run here, and take blocks of this shape and rows of these widths."""
    return (
        device.kind == "cpu"
        and dtype == torch.bfloat16
        and kernels.load() is not None
        and shape.has_own_keys
        and shape.latent is None
        and shape.experts is None
        and shape.attention_softcap is None
        and shape.activation in GATES
        and shape.head_dim % 32 == 0
        and shape.head_dim <= MAX_HEAD_DIM
        and shape.group <= MAX_GROUP
        and all(width % 16 == 0 for width in (shape.hidden, shape.intermediate, shape.query_width, *widths))
    )


@dataclass(frozen=True, slots=True)
class PackedBlock:
    """A block's weights as programs read them; see :class:`paceline.model.block.BlockWeights`. Norms are bfloat16."""

    shape: BlockShape
    attention_norm: Tensor | None
    qkv: PackedWeight
    qk_norm: Tensor | None
    out: PackedWeight
    post_attention_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: PackedWeight
    down: PackedWeight
    post_mlp_norm: Tensor | None

    @classmethod
    def pack(cls, weights: BlockWeights) -> PackedBlock:
        """Reorder a block's weights, which are bfloat16."""
        return cls(
            weights.shape,
            _rounded(weights.attention_norm),
            pack(weights.qkv),
            _rounded(weights.qk_norm),
            pack(weights.out),
            _rounded(weights.post_attention_norm),
            weights.mlp_norm.bfloat16(),
            pack(weights.gate_up, is_gated=True),
            pack(weights.down),
            _rounded(weights.post_mlp_norm),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the panels."""
        return sum(weight.panels.nbytes for weight in (self.qkv, self.out, self.gate_up, self.down))


class BlockBuilder:
    """Adds blocks of one shape to a program; they share their buffers.

    Args:
        program: the program.
        shape: of all blocks.
    """

    def __init__(self, program: Program, shape: BlockShape) -> None:
        self._program = program
        self._qkv = program.buffer(shape.qkv_width)
        self._mixed = program.buffer(shape.query_width)
        self._gated = program.buffer(shape.intermediate)
        # Of products that are normed before they are added.
        self._wide = program.buffer(shape.hidden) if shape.has_sandwich_norms else -1

    def add(
        self,
        block: PackedBlock,
        layer: int,
        rope: Tensor,
        stream: int,
        *,
        read: int | None = None,
        residual: int | None = None,
    ) -> None:
        """Add a block that ends in the buffer `stream`.

        Args:
            block: its weights.
            layer: its layer in the caches.
            rope: `[positions, 2, head_dim]` bfloat16, cosine and signed sine.
            stream: buffer of the residual stream.
            read: buffer that attention reads; None reads the residual.
            residual: buffer that attention's result is added to; None adds to `stream`.
        """
        program, shape = self._program, block.shape
        residual = stream if residual is None else residual
        read = residual if read is None else read
        program.linear(read, self._qkv, block.qkv, norm=block.attention_norm, eps=shape.norm_eps)
        program.attend(
            self._qkv,
            self._mixed,
            layer,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            scale=shape.attention_scale,
            rope=rope,
            window=shape.window,
            qk_norm=block.qk_norm,
            eps=shape.norm_eps,
        )
        self._add_product(self._mixed, block.out, block.post_attention_norm, residual, stream, shape.norm_eps)
        gate = GATES[shape.activation]
        program.linear(stream, self._gated, block.gate_up, gate, norm=block.mlp_norm, eps=shape.norm_eps)
        self._add_product(self._gated, block.down, block.post_mlp_norm, stream, stream, shape.norm_eps)

    def _add_product(
        self, source: int, weight: PackedWeight, norm: Tensor | None, residual: int, stream: int, eps: float
    ) -> None:
        """`stream = residual + weight(source)`, normed first where the family has a norm behind the product."""
        if norm is None:
            self._program.linear(source, stream, weight, Epilogue.ADD, residual=residual)
        else:
            self._program.linear(source, self._wide, weight)
            self._program.norm(self._wide, stream, norm, eps, residual=residual)


def pack(projection: Projection, *, is_gated: bool = False) -> PackedWeight:
    """A projection in panels."""
    return PackedWeight.pack(projection.weight, projection.bias, is_gated=is_gated)


def _rounded(norm: Tensor | None) -> Tensor | None:
    return None if norm is None else norm.bfloat16().contiguous()
