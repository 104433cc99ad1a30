"""The differentiable forward pass of Gemma 4's assistant over whole texts, several steps deep.

Rows are those of :mod:`paceline.methods.gemma4_mtp.objective`: each is the beginning of a draft and has one position
throughout. Layers have queries only and attend to the target's keys and values. Called by the objective.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.methods.gemma4_mtp.model import SLIDING, Gemma4MtpShape, rotary_frequencies
from paceline.model.block import BlockShape
from paceline.target import CachedLayer
from paceline.training.block import DifferentiableBlock, Rotation, rms_norm


class UnrolledAssistant:
    """The assistant over the texts of a batch.

    Args:
        shape: sizes.
        cached: the target's layer that each type of layer reads.
        weights: by checkpoint name, in the compute type.
        features: ``[texts, length, width]``: the target's final-norm output, then keys and values of each layer of
            ``cached``.
    """

    def __init__(
        self,
        shape: Gemma4MtpShape,
        cached: Mapping[str, CachedLayer],
        weights: Mapping[str, Tensor],
        features: Tensor,
    ) -> None:
        self._shape, self._weights = shape, weights
        widths = [shape.backbone, *(one.width for one in cached.values())]
        self._state, *columns = features.split(widths, dim=-1)
        self._caches = {
            kind: column.unflatten(-1, (2 * one.num_kv_heads, one.head_dim)).transpose(1, 2)
            for (kind, one), column in zip(cached.items(), columns, strict=True)
        }  # each [texts, 2 * kv_heads, length, head_dim], keys first
        length, dtype = features.shape[1], features.dtype
        self._masks = {kind: self._mask(kind, length, dtype) for kind in cached}
        self._rotations = {kind: self._rotation(kind, length, dtype) for kind in cached}
        self._layers = [
            (kind, DifferentiableBlock(self._block_shape(kind), weights, f"model.layers.{index}."))
            for index, kind in enumerate(shape.layer_types)
        ]

    def run(self, tokens: Tensor, embedding: Tensor, scale: float, steps: int) -> Iterator[Tensor]:
        """Yields what the head reads at each step, ``[texts, length, hidden]``.

        Args:
            tokens: int64 ``[texts, length]``, right-padded.
            embedding: the target's, ``[vocab, backbone]``.
            scale: factor on the embedding.
            steps: how many.
        """
        ids, state, w = tokens, self._state, self._weights
        for _ in range(steps):
            ids = F.pad(ids[:, 1:], (0, 1))
            embedded = F.embedding(ids, embedding) * scale
            stream = F.linear(torch.cat([embedded, state], dim=-1), w["pre_projection.weight"])
            for index, (kind, layer) in enumerate(self._layers):
                read = layer.norm("input_layernorm", stream)
                mixed = self._attend(kind, layer.heads("q", read, self._rotations[kind]))
                stream = layer.add_branches(stream, mixed) * w[f"model.layers.{index}.layer_scalar"]
            output = rms_norm(stream, w["model.norm.weight"], self._shape.rms_eps)
            state = F.linear(output, w["post_projection.weight"])
            yield output

    def _attend(self, kind: str, queries: Tensor) -> Tensor:
        """Attention to the target's keys and values: ``[texts, rows, heads, head_dim]`` to ``[texts, rows, width]``."""
        keys, values = self._caches[kind].chunk(2, dim=1)
        groups = queries.shape[2] // keys.shape[1]
        # [texts, kv_heads, groups * rows, head_dim]: the rows of one query head, then those of the next
        folded = queries.unflatten(2, (-1, groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        mask = self._masks[kind].repeat(groups, 1)
        mixed = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=1.0)
        by_row: Tensor = mixed.unflatten(2, (groups, -1)).permute(0, 3, 1, 2, 4)
        return by_row.flatten(2)

    def _block_shape(self, kind: str) -> BlockShape:
        shape = self._shape
        return BlockShape(
            hidden=shape.hidden,
            intermediate=shape.intermediate,
            num_heads=shape.num_heads,
            num_kv_heads=self._caches[kind].shape[1] // 2,
            head_dim=shape.head_dims[kind],
            norm_eps=shape.rms_eps,
            attention_scale=1.0,
            activation="gelu_pytorch_tanh",
            has_qk_norm=True,
            has_sandwich_norms=True,
        )

    def _rotation(self, kind: str, length: int, dtype: torch.dtype) -> Rotation:
        """Of rows ``0 .. length - 1``, whose positions are ``1 .. length``: ``[length, 1, head_dim]`` each."""
        shape = self._shape
        frequencies = rotary_frequencies(
            shape.head_dims[kind], shape.rope_thetas[kind], shape.rotary_fractions[kind]
        )
        angles = torch.arange(1, length + 1)[:, None, None].float() * frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def _mask(self, kind: str, length: int, dtype: torch.dtype) -> Tensor:
        """Additive ``[length, length]``: row ``r`` sees positions up to ``r``; in a sliding layer, its window."""
        position = torch.arange(length)
        behind = position[:, None] - position[None]
        is_seen = behind >= 0
        if kind == SLIDING:
            is_seen &= behind <= self._shape.sliding_window
        return torch.zeros(length, length, dtype=dtype).masked_fill_(~is_seen, -torch.inf)
