"""The weights of a decoder layer of the Llama family, fused as executors multiply them.

Responsible for names, fusion and head order. It does not know devices or layouts: executors pack what it reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.model.architecture import Architecture
from paceline.model.weights import SafetensorsDir


@dataclass(frozen=True, slots=True)
class Projection:
    """A weight `[out_features, in_features]` and its bias `[out_features]`, if it has one."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Norms are float32 with the family's offset applied; heads are group-major.

    Group-major: query heads that share key head `h` stand at `h`, `h + num_kv_heads`, ...

    Attributes:
        qkv: `[(num_heads + 2 * num_kv_heads) * head_dim, hidden]`.
        qk_norm: `[num_heads + num_kv_heads, head_dim]` where the family norms heads.
        out: `[hidden, num_heads * head_dim]`.
        gate_up: `[2 * intermediate, hidden]`, gates first.
        down: `[hidden, intermediate]`.
    """

    attention_norm: Tensor
    qkv: Projection
    qk_norm: Tensor | None
    out: Projection
    post_attention_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection
    post_mlp_norm: Tensor | None


class DecoderWeights:
    """Reads a checkpoint of the family, a layer at a time."""

    def __init__(self, arch: Architecture, weights: SafetensorsDir, dtype: torch.dtype) -> None:
        self._arch = arch
        self._weights = weights
        self._dtype = dtype

    @property
    def embedding(self) -> Tensor:
        """`[vocab, hidden]`."""
        return self._weights.get("model.embed_tokens.weight", self._dtype)

    @property
    def head(self) -> Tensor:
        """`[vocab, hidden]`; the embedding where the two are tied."""
        return (
            self.embedding if self._arch.has_tied_head else self._weights.get("lm_head.weight", self._dtype)
        )

    @property
    def final_norm(self) -> Tensor:
        """`[hidden]`."""
        return self._norm("model.norm")

    def layer(self, index: int) -> LayerWeights:
        """Layer `index`."""
        arch, prefix = self._arch, f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qk_norm = None
        if arch.has_qk_norm:
            query, key = self._norm(f"{attention}.q_norm"), self._norm(f"{attention}.k_norm")
            qk_norm = torch.cat([query.expand(arch.num_heads, -1), key.expand(arch.num_kv_heads, -1)])
        out = self._projection([f"{attention}.o_proj"])
        before_mlp = "pre_feedforward_layernorm" if arch.has_sandwich_norms else "post_attention_layernorm"
        sandwich = arch.has_sandwich_norms
        return LayerWeights(
            attention_norm=self._norm(f"{prefix}.input_layernorm"),
            qkv=self._projection([f"{attention}.{name}_proj" for name in "qkv"], reorder_first=True),
            qk_norm=qk_norm,
            out=Projection(self._group_major(out.weight.t().contiguous()).t().contiguous(), out.bias),
            post_attention_norm=self._norm(f"{prefix}.post_attention_layernorm") if sandwich else None,
            mlp_norm=self._norm(f"{prefix}.{before_mlp}"),
            gate_up=self._projection([f"{mlp}.gate_proj", f"{mlp}.up_proj"]),
            down=self._projection([f"{mlp}.down_proj"]),
            post_mlp_norm=self._norm(f"{prefix}.post_feedforward_layernorm") if sandwich else None,
        )

    def _norm(self, name: str) -> Tensor:
        return self._weights.get(f"{name}.weight", torch.float32) + self._arch.norm_offset

    def _group_major(self, rows: Tensor) -> Tensor:
        return group_major(rows, self._arch.num_kv_heads, self._arch.head_dim)

    def _projection(self, names: list[str], *, reorder_first: bool = False) -> Projection:
        weights = [self._weights.get(f"{name}.weight", self._dtype) for name in names]
        biases = [
            self._weights.get(f"{name}.bias", self._dtype)
            for name in names
            if f"{name}.bias" in self._weights
        ]
        if reorder_first:
            weights[0] = self._group_major(weights[0])
            if biases:
                biases[0] = self._group_major(biases[0])
        return Projection(torch.cat(weights), torch.cat(biases) if biases else None)


def group_major(rows: Tensor, num_kv_heads: int, head_dim: int) -> Tensor:
    """Query heads `[num_heads * head_dim, ...]`, reordered from key-head-major to group-major."""
    by_head = rows.view(num_kv_heads, -1, head_dim, *rows.shape[1:])
    return by_head.transpose(0, 1).reshape(rows.shape)
