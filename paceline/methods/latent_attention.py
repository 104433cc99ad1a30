"""Latent attention in drafters' checkpoints: its sizes, and its tensors by DeepSeek-V3's names.

`shape.latent` of a checkpoint has the fields of :class:`paceline.model.latent.LatentShape`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from paceline.methods.checkpoint import CheckpointError, DrafterConfig
from paceline.methods.shape_section import read_section
from paceline.model.latent import LatentShape, LatentWeights
from paceline.model.projection import Projection


def latent_shape(config: DrafterConfig) -> LatentShape | None:
    """Sizes of a checkpoint's latent attention; None if it has ordinary heads.

    Raises:
        CheckpointError: a field is missing, unknown, of another type, or does not fit the others.
    """
    content = read_section(config, "latent", fields(LatentShape))
    if content is None:
        return None
    shape = LatentShape(**content)
    for name in ("kv_rank", "rope_dim", "value_dim"):
        if getattr(shape, name) < 1:
            raise CheckpointError(f"shape.latent.{name} must be at least 1")
    if shape.rope_dim % 2:
        raise CheckpointError(f"shape.latent.rope_dim must be even, not {shape.rope_dim}")
    return shape


def latent_scale(shape: LatentShape, rope: Mapping[str, Any]) -> float:
    """Factor on attention scores, with YaRN's share (`mscale_all_dim`) as DeepSeek-V3 has it.

    Args:
        shape: sizes.
        rope: rotary parameters, as transformers names them.

    Raises:
        CheckpointError: YaRN's factor or its share is no number.
    """
    scale = float(shape.key_dim**-0.5)
    share, factor = rope.get("mscale_all_dim") or 0, rope.get("factor") or 1
    for name, value in (("mscale_all_dim", share), ("factor", factor)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise CheckpointError(f"shape.rope_parameters.{name} must be a number, not {value!r}")
    if rope.get("rope_type", "default") == "default" or not share or factor <= 1:
        return scale
    return float(scale * (0.1 * share * math.log(factor) + 1.0) ** 2)


def latent_tensors(
    shape: LatentShape, num_heads: int, hidden: int, read_width: int
) -> dict[str, tuple[int, ...]]:
    """Tensors of the attention by name.

    Args:
        shape: sizes.
        num_heads: query heads.
        hidden: width of the residual stream.
        read_width: width of what attention reads.
    """
    queries = num_heads * shape.key_dim
    shapes: dict[str, tuple[int, ...]]
    if shape.q_rank:
        shapes = {
            "self_attn.q_a_proj.weight": (shape.q_rank, read_width),
            "self_attn.q_a_layernorm.weight": (shape.q_rank,),
            "self_attn.q_b_proj.weight": (queries, shape.q_rank),
        }
    else:
        shapes = {"self_attn.q_proj.weight": (queries, read_width)}
    return shapes | {
        "self_attn.kv_a_proj_with_mqa.weight": (shape.cache_width, read_width),
        "self_attn.kv_a_layernorm.weight": (shape.kv_rank,),
        "self_attn.kv_b_proj.weight": (num_heads * (shape.nope_dim + shape.value_dim), shape.kv_rank),
        "self_attn.o_proj.weight": (hidden, num_heads * shape.value_dim),
    }


def read_latent(
    shape: LatentShape, num_heads: int, tensors: Mapping[str, Tensor], prefix: str, dtype: torch.dtype
) -> tuple[Projection, LatentWeights]:
    """The first products of a block's attention, and what follows them.

    Args:
        shape: sizes.
        num_heads: query heads.
        tensors: by the names of :func:`latent_tensors`.
        prefix: of the block's names.
        dtype: to compute in.
    """

    def get(name: str) -> Tensor:
        return tensors[f"{prefix}self_attn.{name}.weight"].to(dtype)

    def halves(weight: Tensor, heads: int) -> Tensor:
        """Rows of rotary pairs half of `rope_dim` apart; they are the last `rope_dim` of each head."""
        if not shape.interleaved:
            return weight
        by_head = weight.unflatten(0, (heads, -1))
        kept, turned = by_head[:, : -shape.rope_dim], by_head[:, -shape.rope_dim :]
        return torch.cat([kept, turned[:, 0::2], turned[:, 1::2]], dim=1).flatten(0, 1)

    queries = halves(get("q_b_proj" if shape.q_rank else "q_proj"), num_heads)
    latent = halves(get("kv_a_proj_with_mqa"), 1)
    up = get("kv_b_proj").unflatten(0, (num_heads, -1))
    first = get("q_a_proj") if shape.q_rank else queries
    weights = LatentWeights(
        query_norm=get("q_a_layernorm") if shape.q_rank else None,
        query_up=Projection(queries) if shape.q_rank else None,
        latent_norm=get("kv_a_layernorm"),
        key_up=up[:, : shape.nope_dim].contiguous(),
        value_up=up[:, shape.nope_dim :].contiguous(),
    )
    return Projection.join([Projection(first), Projection(latent)]), weights
