"""Reads the weights of a decoder of the Llama family from its checkpoint, a layer at a time.

This file knows the tensors' names. It does not know devices or layouts: executors pack what it reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.model.architecture import Architecture
from paceline.model.block import BlockWeights
from paceline.model.projection import Projection
from paceline.model.weights import SafetensorsDir


class DecoderWeights:
    """A checkpoint of the family. Norms are read in float32 with the family's offset added."""

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

    def block(self, index: int) -> BlockWeights:
        """Layer `index`."""
        shape, prefix = self._arch.block(index), f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        is_sandwich = shape.has_sandwich_norms
        before_mlp = "pre_feedforward_layernorm" if is_sandwich else "post_attention_layernorm"
        return BlockWeights.fuse(
            shape,
            attention_norm=self._norm(f"{prefix}.input_layernorm"),
            query=self._projection(f"{attention}.q_proj"),
            key=self._projection(f"{attention}.k_proj"),
            value=self._projection(f"{attention}.v_proj"),
            query_norm=self._norm(f"{attention}.q_norm") if shape.has_qk_norm else None,
            key_norm=self._norm(f"{attention}.k_norm") if shape.has_qk_norm else None,
            out=self._projection(f"{attention}.o_proj"),
            post_attention_norm=self._norm(f"{prefix}.post_attention_layernorm") if is_sandwich else None,
            mlp_norm=self._norm(f"{prefix}.{before_mlp}"),
            gate=self._projection(f"{mlp}.gate_proj"),
            up=self._projection(f"{mlp}.up_proj"),
            down=self._projection(f"{mlp}.down_proj"),
            post_mlp_norm=self._norm(f"{prefix}.post_feedforward_layernorm") if is_sandwich else None,
        )

    def _norm(self, name: str) -> Tensor:
        return self._weights.get(f"{name}.weight", torch.float32) + self._arch.norm_offset

    def _projection(self, name: str) -> Projection:
        weight, bias = f"{name}.weight", f"{name}.bias"
        has_bias = bias in self._weights
        return Projection(
            self._weights.get(weight, self._dtype), self._weights.get(bias, self._dtype) if has_bias else None
        )
