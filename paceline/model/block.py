"""One decoder block: its numbers and its weights, fused as backends multiply them.

Attention is that of the Llama family, or latent (`latent.py`). Every row passes an MLP; experts may be beside it, of
which each row passes a few (`experts.py`).

This file describes a block and computes nothing. The target's layers and the drafters' layers are both described this
way. Three backends run the description: `paceline.model.torch_block` in torch operators without gradients,
`paceline.training.block` for training (differentiable), and `paceline.cpu.block` on the CPU kernels. Models that
`paceline.target.executors.generic` runs have no such description: transformers runs their blocks.

Heads are *group-major* in all weights: query heads that share key head `h` are rows `h`, `h + num_kv_heads`, ...
Checkpoints store them key-head-major; :func:`group_major` converts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.model.experts import ExpertsShape, ExpertsWeights
from paceline.model.latent import LatentShape, LatentWeights
from paceline.model.projection import Projection


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Sizes of a block, and what differs from family to family.

    Attributes:
        norm_eps: of all norms.
        activation: `silu` or `gelu_pytorch_tanh`, of the gate.
        attention_scale: factor on attention scores.
        attention_softcap: cap scores with `softcap * tanh(score / softcap)`; None does not cap.
        window: sliding window in tokens, the row itself included; None for full attention.
        rope_key: which rotary table the block uses; None where the model has one table.
        has_qk_norm: queries and keys are normed head by head before they are rotated.
        has_sandwich_norms: norms after attention and after the MLP as well as before them (Gemma).
        has_own_keys: False for a block with queries alone, which attends to keys and values of another model.
        latent: sizes of latent attention; None for the family's. All heads then share one key head of
            `latent.cache_width`, which is `head_dim`.
        experts: sizes of routed experts, or None. `intermediate` is then that of the shared experts, 0 for none.
    """

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    attention_scale: float
    activation: str = "silu"
    attention_softcap: float | None = None
    window: int | None = None
    rope_key: str | None = None
    has_qk_norm: bool = False
    has_sandwich_norms: bool = False
    has_own_keys: bool = True
    latent: LatentShape | None = None
    experts: ExpertsShape | None = None

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def query_width(self) -> int:
        """Columns of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def rope_dim(self) -> int:
        """Width of the rotary table."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def num_own_kv_heads(self) -> int:
        """Key heads that the block computes."""
        return self.num_kv_heads if self.has_own_keys else 0

    @property
    def qkv_width(self) -> int:
        """Columns of queries, keys and values together."""
        return (self.num_heads + 2 * self.num_own_kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """A block's weights, not yet packed for a device. Norms have the family's offset applied.

    Attributes:
        shape: sizes.
        attention_norm: `[hidden]`, before attention; None where attention reads what it is given.
        qkv: `[(num_heads + 2 * num_own_kv_heads) * head_dim, read_width]`, group-major. `read_width` is `hidden`
            unless attention reads something else than the residual stream. With latent attention the first products,
            see :class:`paceline.model.latent.LatentWeights`.
        qk_norm: `[num_heads + num_own_kv_heads, head_dim]`, or None.
        out: `[hidden, num_heads * head_dim]`, group-major; `[hidden, num_heads * value_dim]` of latent attention.
        post_attention_norm: `[hidden]`, after attention, or None.
        mlp_norm: `[hidden]`, before the MLP.
        gate_up: `[2 * intermediate, hidden]`, gates first.
        down: `[hidden, intermediate]`.
        post_mlp_norm: `[hidden]`, after the MLP, or None.
        latent: what latent attention has besides, or None.
        experts: routed experts, or None.
    """

    shape: BlockShape
    attention_norm: Tensor | None
    qkv: Projection
    qk_norm: Tensor | None
    out: Projection
    post_attention_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection
    post_mlp_norm: Tensor | None
    latent: LatentWeights | None = None
    experts: ExpertsWeights | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Type of the projections."""
        return self.qkv.weight.dtype

    @classmethod
    def fuse(
        cls,
        shape: BlockShape,
        *,
        query: Projection,
        key: Projection,
        value: Projection,
        out: Projection,
        gate: Projection,
        up: Projection,
        down: Projection,
        mlp_norm: Tensor,
        attention_norm: Tensor | None = None,
        query_norm: Tensor | None = None,
        key_norm: Tensor | None = None,
        post_attention_norm: Tensor | None = None,
        post_mlp_norm: Tensor | None = None,
        experts: ExpertsWeights | None = None,
    ) -> BlockWeights:
        """Fuse the family's projections as checkpoints store them: heads key-head-major, head norms `[head_dim]`."""
        kv_heads, head_dim = shape.num_kv_heads, shape.head_dim
        qk_norm = None
        if query_norm is not None and key_norm is not None:
            qk_norm = torch.cat([query_norm.expand(shape.num_heads, -1), key_norm.expand(kv_heads, -1)])
        query_bias = None if query.bias is None else group_major(query.bias, kv_heads, head_dim)
        query = Projection(group_major(query.weight, kv_heads, head_dim), query_bias)
        mixed = group_major(out.weight.t().contiguous(), kv_heads, head_dim).t().contiguous()
        return cls(
            shape=shape,
            attention_norm=attention_norm,
            qkv=Projection.join([query, key, value]),
            qk_norm=qk_norm,
            out=Projection(mixed, out.bias),
            post_attention_norm=post_attention_norm,
            mlp_norm=mlp_norm,
            gate_up=Projection.join([gate, up]),
            down=down,
            post_mlp_norm=post_mlp_norm,
            experts=experts,
        )


def group_major(rows: Tensor, num_kv_heads: int, head_dim: int) -> Tensor:
    """Query heads `[num_heads * head_dim, ...]`, reordered from key-head-major to group-major."""
    by_head = rows.view(num_kv_heads, -1, head_dim, *rows.shape[1:])
    return by_head.transpose(0, 1).reshape(rows.shape)
