"""A decoder block in torch operators, for inference: the backend that runs everywhere.

The block computes norms, projections, rotary positions, the MLP and experts. What its rows attend to is the caller's:
the target passes the plan of a step, a drafter passes its cache slots. The target's lean executor and the drafters'
torch layers run their blocks through this class.

On CPU one decode step costs little more than reading the weights, so each avoidable operator call shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.model.block import BlockShape, BlockWeights
from paceline.model.device import Device
from paceline.model.latent import LATENT_NORM_EPS, LatentWeights
from paceline.model.linear import Linear
from paceline.model.norm import RmsNorm
from paceline.model.projection import Projection
from paceline.model.torch_experts import TorchExperts

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
        has_mlp = shape.intermediate > 0
        self._gate_up = linear(weights.gate_up) if has_mlp else None
        self._down = linear(weights.down) if has_mlp else None
        latent, experts = weights.latent, weights.experts
        self._latent = None if latent is None else TorchLatent(latent, shape, device, dtype, packed=packed)
        self._experts = None if experts is None else TorchExperts(experts, shape, device, packed=packed)
        self._post_mlp_norm = norm(weights.post_mlp_norm)

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed projections."""
        products = (self._qkv, self._out, self._gate_up, self._down, self._latent, self._experts)
        return sum(weight.num_bytes for weight in products if weight is not None)

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
        if self._latent is None:
            mixed = self._mix(self._qkv(read), rope, attention)
        else:
            mixed = self._latent.mix(self._qkv(read), rope, attention, self.layer)
        if self._post_attention_norm is None:
            hidden = self._out.add(mixed, hidden)
        else:
            hidden = hidden + self._post_attention_norm(self._out(mixed))
        normed = self._mlp_norm(hidden)
        if self._experts is not None:
            hidden = hidden + self._experts(normed)
        if self._gate_up is None or self._down is None:
            return hidden
        gate, up = self._gate_up(normed).chunk(2, dim=-1)
        gated = (F.gelu(gate, approximate="tanh") if self._is_gelu else F.silu(gate)).mul_(up)
        if self._experts is not None and self._experts.shared_gate is not None:
            gated.mul_(self._experts.shared_gate(normed).sigmoid())
        if self._post_mlp_norm is None:
            return self._down.add(gated, hidden)
        return hidden + self._post_mlp_norm(self._down(gated))

    def _mix(self, qkv: Tensor, rope: Rope, attention: Attention) -> Tensor:
        """What ordinary heads read, `[n, num_heads * head_dim]`, of products `[n, qkv_width]`."""
        shape = self.shape
        heads, kv_heads = shape.num_heads, self._num_own_kv_heads
        qkv = qkv.view(-1, heads + 2 * kv_heads, shape.head_dim)
        rotate(qkv.narrow(1, 0, heads + kv_heads), rope, self._qk_norm, shape.norm_eps)
        queries = qkv.narrow(1, 0, heads).view(-1, shape.group, shape.num_kv_heads, shape.head_dim)
        keys_values = qkv.narrow(1, heads, 2 * kv_heads)
        return attention(queries, keys_values, self.layer, self._scoring)


class TorchLatent:
    """Latent attention with its weights packed for a device; see `paceline.model.latent`.

    The maps from the latent to the heads' keys and values are absorbed: queries are mapped to the latent's width, and
    the sum of latents that a head reads is mapped to the head's values. A cache row is the latent and the rotated key,
    as key and as value alike, so that caches store it once; of the values' sum the rotary part is dropped.

    Args:
        weights: of the attention.
        shape: of the block; has latent attention.
        device: where it runs.
        dtype: of activations and norms.
        packed: False keeps the plain weight layout.
    """

    def __init__(
        self, weights: LatentWeights, shape: BlockShape, device: Device, dtype: torch.dtype, *, packed: bool
    ) -> None:
        assert shape.latent is not None
        where, norm, up = device.torch_device, weights.query_norm, weights.query_up
        self._sizes, self._num_heads = shape.latent, shape.num_heads
        self._scoring = Scoring(shape.attention_scale, shape.window)
        self._query_norm = None if norm is None else RmsNorm(norm.to(where, dtype), LATENT_NORM_EPS)
        self._query_up = None if up is None else device.pack(up.weight, up.bias, packed=packed)
        self._latent_norm = RmsNorm(weights.latent_norm.to(where, dtype), LATENT_NORM_EPS)
        self._key_up = weights.key_up.to(where, dtype)  # [num_heads, nope_dim, kv_rank]
        self._value_down = weights.value_up.to(where, dtype).transpose(
            1, 2
        )  # [num_heads, kv_rank, value_dim]

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed projections."""
        up = 0 if self._query_up is None else self._query_up.num_bytes
        return up + self._key_up.nbytes + self._value_down.nbytes

    def mix(self, products: Tensor, rope: Rope, attention: Attention, layer: int) -> Tensor:
        """What the heads read, `[n, num_heads * value_dim]`.

        Args:
            products: of the block's first projection, `[n, qkv_width]`.
            rope: of the rows' positions, `rope_dim` wide.
            attention: over the rows' caches.
            layer: the block's layer in the caches.
        """
        sizes, heads, n = self._sizes, self._num_heads, products.shape[0]
        cached = products[:, -sizes.cache_width :]
        queries = products[:, : -sizes.cache_width]
        if self._query_norm is not None and self._query_up is not None:
            queries = self._query_up(self._query_norm(queries))
        queries = queries.reshape(n, heads, sizes.key_dim)
        plain, turned = queries.split([sizes.nope_dim, sizes.rope_dim], dim=-1)
        latent, key = cached.split([sizes.kv_rank, sizes.rope_dim], dim=-1)
        rotate(turned, rope, None, 0.0)
        rotate(key.unsqueeze(1), rope, None, 0.0)
        absorbed = torch.bmm(plain.transpose(0, 1), self._key_up).transpose(0, 1)  # [n, heads, kv_rank]
        row = torch.cat((self._latent_norm(latent), key), dim=-1).unsqueeze(1)  # [n, 1, cache_width]
        asked = torch.cat((absorbed, turned), dim=-1).unsqueeze(2)  # [n, heads, 1, cache_width]
        mixed = attention(asked, row.expand(-1, 2, -1), layer, self._scoring)
        latents = mixed.view(n, heads, sizes.cache_width)[..., : sizes.kv_rank]
        return torch.bmm(latents.transpose(0, 1), self._value_down).transpose(0, 1).reshape(n, -1)


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
