"""Decoder blocks in drafters' checkpoints: their tensors by name, their sizes, and their rotary table.

Public checkpoints name a block's tensors alike whatever the method. Methods read blocks through this file; see
`paceline.model.block` for what a block is.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from paceline.methods.checkpoint import CheckpointError, DrafterConfig
from paceline.methods.latent_attention import latent_scale, latent_shape, latent_tensors, read_latent
from paceline.methods.routed_experts import experts_shape, experts_tensors, read_experts
from paceline.model.block import BlockShape, BlockWeights
from paceline.model.projection import Projection
from paceline.model.rope import RopeTable

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary variants whose frequencies do not depend on the length of the text."""


def num_layers(config: DrafterConfig) -> int:
    """Blocks of a checkpoint; one where `shape.num_layers` is not given."""
    return config.size("num_layers") if "num_layers" in config.shape else 1


def block_shapes(config: DrafterConfig, prefix: str, read_width: int) -> dict[str, tuple[int, ...]]:
    """A block's tensors by name.

    Args:
        config: the checkpoint's. `shape` holds the sizes; `qkv_bias` says that queries, keys and values have a bias,
            `head_norms` that queries and keys are normed head by head; `latent` and `experts` describe latent attention
            and routed experts.
        prefix: of the names, such as `midlayer.`.
        read_width: width of what attention reads.
    """
    d, heads = config.size("hidden"), config.size("num_heads")
    latent, experts, intermediate = latent_shape(config), experts_shape(config), mlp_width(config)
    q = kv = 0
    # Random starting weights are drawn in this order: a new name goes behind those that a block had before.
    shapes: dict[str, tuple[int, ...]] = {"post_attention_layernorm.weight": (d,)}
    if latent is None:
        q, kv = heads * config.size("head_dim"), config.size("num_kv_heads") * config.size("head_dim")
        shapes |= {
            "self_attn.q_proj.weight": (q, read_width),
            "self_attn.k_proj.weight": (kv, read_width),
            "self_attn.v_proj.weight": (kv, read_width),
            "self_attn.o_proj.weight": (d, q),
        }
    else:
        shapes |= latent_tensors(latent, heads, d, read_width)
    if intermediate:
        mlp = mlp_prefix(config)
        shapes |= {
            f"{mlp}gate_proj.weight": (intermediate, d),
            f"{mlp}up_proj.weight": (intermediate, d),
            f"{mlp}down_proj.weight": (d, intermediate),
        }
    if experts is not None:
        shapes |= experts_tensors(experts, d)
    if latent is not None and (config.flag("qkv_bias") or config.flag("head_norms")):
        raise CheckpointError("shape.latent: latent attention has neither qkv_bias nor head_norms")
    if config.flag("qkv_bias"):
        shapes |= {f"self_attn.{x}_proj.bias": (q if x == "q" else kv,) for x in "qkv"}
    if config.flag("head_norms"):
        shapes |= {f"self_attn.{x}_norm.weight": (config.size("head_dim"),) for x in "qk"}
    return {prefix + name: shape for name, shape in shapes.items()}


def mlp_width(config: DrafterConfig) -> int:
    """Width of the MLP that every row passes; 0 where there are routed experts alone."""
    if config.shape.get("experts") is not None and config.shape.get("intermediate") == 0:
        return 0
    return config.size("intermediate")


def mlp_prefix(config: DrafterConfig) -> str:
    """What the names of that MLP begin with within a block."""
    return "mlp." if config.shape.get("experts") is None else "mlp.shared_experts."


def rope_parameters(config: DrafterConfig) -> dict[str, Any]:
    """A checkpoint's rotary parameters, as transformers names them: `shape.rope_parameters`, or `rope_theta` alone.

    Raises:
        CheckpointError: of a variant that is not supported.
    """
    parameters = config.shape.get("rope_parameters")
    if parameters is None:
        parameters = {"rope_type": "default", "rope_theta": config.shape.get("rope_theta", 10000.0)}
    if not isinstance(parameters, Mapping) or parameters.get("rope_type") not in ROPE_TYPES:
        raise CheckpointError(f"shape.rope_parameters.rope_type must be one of {', '.join(ROPE_TYPES)}")
    return {**parameters, "rope_theta": float(parameters.get("rope_theta", 10000.0))}


def rope_table(config: DrafterConfig, dtype: torch.dtype, device: torch.device) -> RopeTable:
    """The rotary table of a checkpoint."""
    heads, latent = config.size("num_heads"), latent_shape(config)
    head_dim = config.size("head_dim") if latent is None else latent.rope_dim
    parameters = rope_parameters(config)
    # The default needs no more of a configuration, and transformers' configurations take seconds to import.
    if parameters["rope_type"] == "default":
        return RopeTable(SimpleNamespace(rope_parameters=parameters), None, head_dim, dtype, device)
    from transformers import LlamaConfig

    like = LlamaConfig(
        hidden_size=heads * head_dim,
        num_attention_heads=heads,
        head_dim=head_dim,
        max_position_embeddings=config.size("max_positions"),
        rope_parameters=parameters,
    )
    return RopeTable(like, None, head_dim, dtype, device)


def block_shape(config: DrafterConfig) -> BlockShape:
    """Sizes of a checkpoint's blocks.

    Raises:
        CheckpointError: the number of query heads is no multiple of the number of key heads.
    """
    latent, num_heads = latent_shape(config), config.size("num_heads")
    num_kv_heads = config.size("num_kv_heads") if latent is None else 1
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"shape.num_heads {num_heads} is no multiple of shape.num_kv_heads {num_kv_heads}"
        )
    head_dim = config.size("head_dim") if latent is None else latent.cache_width
    return BlockShape(
        hidden=config.size("hidden"),
        intermediate=mlp_width(config),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=float(config.shape.get("rms_eps", 1e-5)),
        attention_scale=float(head_dim**-0.5)
        if latent is None
        else latent_scale(latent, rope_parameters(config)),
        has_qk_norm=config.flag("head_norms"),
        latent=latent,
        experts=experts_shape(config),
    )


def read_block(
    config: DrafterConfig,
    tensors: Mapping[str, Tensor],
    prefix: str,
    dtype: torch.dtype,
    *,
    has_input_norm: bool,
) -> BlockWeights:
    """A block of a checkpoint.

    Args:
        config: the checkpoint's.
        tensors: by the names of :func:`block_shapes`, and `input_layernorm.weight` where the block norms what
            attention reads.
        prefix: of the names.
        dtype: to compute in.
        has_input_norm: whether attention reads the norm of what it is given.

    Raises:
        CheckpointError: see :func:`block_shape`.
    """
    shape, has_bias = block_shape(config), config.flag("qkv_bias")

    def norm(name: str) -> Tensor:
        return tensors[f"{prefix}{name}.weight"].to(dtype)

    def projection(name: str, has_bias: bool = False) -> Projection:
        bias = tensors[f"{prefix}{name}.bias"].to(dtype) if has_bias else None
        return Projection(tensors[f"{prefix}{name}.weight"].to(dtype), bias)

    attention_norm = norm("input_layernorm") if has_input_norm else None
    mlp_norm, out = norm("post_attention_layernorm"), projection("self_attn.o_proj")
    experts = None if shape.experts is None else read_experts(shape.experts, tensors, prefix, dtype)
    if shape.intermediate:
        names = (f"{mlp_prefix(config)}{x}_proj" for x in ("gate", "up", "down"))
        gate, up, down = (projection(name) for name in names)
    else:
        gate = up = Projection(torch.empty(0, shape.hidden, dtype=dtype))
        down = Projection(torch.empty(shape.hidden, 0, dtype=dtype))
    if shape.latent is not None:
        qkv, latent = read_latent(shape.latent, shape.num_heads, tensors, prefix, dtype)
        gate_up = Projection.join([gate, up])
        return BlockWeights(
            shape, attention_norm, qkv, None, out, None, mlp_norm, gate_up, down, None, latent, experts
        )
    return BlockWeights.fuse(
        shape,
        attention_norm=attention_norm,
        query=projection("self_attn.q_proj", has_bias),
        key=projection("self_attn.k_proj", has_bias),
        value=projection("self_attn.v_proj", has_bias),
        query_norm=norm("self_attn.q_norm") if shape.has_qk_norm else None,
        key_norm=norm("self_attn.k_norm") if shape.has_qk_norm else None,
        out=out,
        mlp_norm=mlp_norm,
        gate=gate,
        up=up,
        down=down,
        experts=experts,
    )
