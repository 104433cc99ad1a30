"""A decoder block in torch operators, for inference: the backend that runs everywhere.

The block computes norms, projections, rotary positions and the MLP. What its rows attend to is the caller's: the target
passes the plan of a step, a drafter passes its cache slots. The target's lean executor and the drafters' torch layers
run their blocks through this class.

On CPU one decode step costs little more than reading the weights, so each avoidable operator call shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.model.block import BlockWeights, Projection
from paceline.model.device import Device
from paceline.model.linear import Linear
from paceline.model.norm import RmsNorm

Rope = tuple[Tensor, Tensor]
"""Cosine and signed sine of each row's position, `[n, 1, head_dim]` each."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer scores keys.

    Attributes:
        scale: factor on the scores.
        window: sliding window in tokens, the row itself included; None for full attention.
        softcap: cap scores with `softcap * tanh(score / softcap)`.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


class Attention(Protocol):
    """Attention of one pass's rows over their sequences' caches."""

    def __call__(self, queries: Tensor, keys_values: Tensor, layer: int, scoring: Scoring, /) -> Tensor:
        """Store a layer's new keys and values, then attend each sequence over its own cache.

        Args:
            queries: `[n, group, num_kv_heads, head_dim]`, rotated.
            keys_values: `[n, 2 * num_kv_heads, head_dim]`, keys rotated, keys first; no heads where the block has
                queries alone.
            layer: layer index in the cache.
            scoring: scale, window and cap of this layer.

        Returns:
            `[n, group * num_kv_heads * head_dim]`.
        """


class TorchBlock:
    """A block with its weights packed for a device.

    Args:
        weights: of the block.
        device: where it runs.
        dtype: of activations and norms.
        layer: its layer in the caches.
        packed: False keeps the plain weight layout.
    """

    def __init__(
        self, weights: BlockWeights, device: Device, dtype: torch.dtype, layer: int, *, packed: bool = True
    ) -> None:
        where, shape = device.torch_device, weights.shape

        def linear(projection: Projection) -> Linear:
            return device.pack(projection.weight, projection.bias, packed=packed)

        def norm(weight: Tensor | None) -> RmsNorm | None:
            return None if weight is None else RmsNorm(weight.to(dtype).to(where), shape.norm_eps)

        self.shape, self.layer = shape, layer
        self._num_own_kv_heads = shape.num_own_kv_heads
        self._scoring = Scoring(shape.attention_scale, shape.window, shape.attention_softcap)
        self._is_gelu = shape.activation != "silu"
        self._attention_norm = norm(weights.attention_norm)
        self._qkv = linear(weights.qkv)
        qk_norm = weights.qk_norm
        self._qk_norm = None if qk_norm is None else qk_norm.to(dtype).to(where).contiguous()
        self._out = linear(weights.out)
        self._post_attention_norm = norm(weights.post_attention_norm)
        self._mlp_norm = RmsNorm(weights.mlp_norm.to(dtype).to(where), shape.norm_eps)
        self._gate_up = linear(weights.gate_up)
        self._down = linear(weights.down)
        self._post_mlp_norm = norm(weights.post_mlp_norm)

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed projections."""
        return sum(weight.num_bytes for weight in (self._qkv, self._out, self._gate_up, self._down))

    def forward(
        self, hidden: Tensor, rope: Rope, attention: Attention, *, read: Tensor | None = None
    ) -> Tensor:
        """Run rows: `[n, hidden] -> [n, hidden]`.

        Args:
            hidden: residual stream.
            rope: of the rows' positions.
            attention: over the rows' caches.
            read: `[n, read_width]`, what attention reads; None reads the residual stream, normed if there is a norm.
        """
        if read is None:
            read = hidden if self._attention_norm is None else self._attention_norm(hidden)
        shape = self.shape
        heads, kv_heads = shape.num_heads, self._num_own_kv_heads
        qkv = self._qkv(read).view(-1, heads + 2 * kv_heads, shape.head_dim)
        rotate(qkv.narrow(1, 0, heads + kv_heads), rope, self._qk_norm, shape.norm_eps)
        queries = qkv.narrow(1, 0, heads).view(-1, shape.group, shape.num_kv_heads, shape.head_dim)
        keys_values = qkv.narrow(1, heads, 2 * kv_heads)
        mixed = attention(queries, keys_values, self.layer, self._scoring)
        if self._post_attention_norm is None:
            hidden = self._out.add(mixed, hidden)
        else:
            hidden = hidden + self._post_attention_norm(self._out(mixed))
        gate, up = self._gate_up(self._mlp_norm(hidden)).chunk(2, dim=-1)
        gated = (F.gelu(gate, approximate="tanh") if self._is_gelu else F.silu(gate)).mul_(up)
        if self._post_mlp_norm is None:
            return self._down.add(gated, hidden)
        return hidden + self._post_mlp_norm(self._down(gated))


def rotate(heads: Tensor, rope: Rope, norm: Tensor | None, eps: float) -> None:
    """Norm heads `[n, heads, head_dim]` where the family does, then rotate them, in place.

    Args:
        heads: queries and keys, or keys alone.
        rope: of the rows' positions.
        norm: `[heads, head_dim]`, or None.
        eps: of the norm.
    """
    head_dim = heads.shape[-1]
    if norm is not None:
        torch.mul(F.rms_norm(heads, (head_dim,), None, eps), norm, out=heads)
    swapped = heads.roll(head_dim // 2, -1)
    heads.mul_(rope[0]).addcmul_(swapped, rope[1])
