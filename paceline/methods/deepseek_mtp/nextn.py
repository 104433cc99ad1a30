"""Multi-token prediction modules in their targets' checkpoints: layers after the target's last one.

Reads the names of DeepSeek-V3, which GLM shares (`model.layers.{num_hidden_layers}.enorm.weight`, ...), and those of
MiMo (`model.mtp_layers.0.token_layernorm.weight`, ...; it joins the hidden state first). SGLang's NextN exports of
DeepSeek-V3 hold the module alone, as layer 0. The directory may hold the complete model: other tensors are not read.
Blocks of the Llama family are supported, with biases of queries, keys and values, or norms of heads, and DeepSeek-V3's
own: latent attention and experts, in 8 bits as it is published. Nothing is unpickled.

An export loses what the layout does not have: the target's fingerprint, how the modules were trained, and which part of
the vocabulary they propose (other programs let them propose all).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.methods.checkpoint import CheckpointError, DrafterConfig
from paceline.methods.deepseek_mtp.deepseek_block import (
    has_latent,
    is_standalone,
    read_latent,
    read_mlp,
    read_sizes,
    write_block,
)
from paceline.methods.deepseek_mtp.layer import module_prefix, num_modules, parameter_shapes
from paceline.methods.layouts.block_scaled import read_scaled
from paceline.methods.layouts.layout import Layout
from paceline.methods.layouts.llama_config import block_shape, llama_config
from paceline.methods.layouts.public_checkpoint import PublicCheckpoint
from paceline.methods.layouts.target_facts import TargetFacts
from paceline.methods.layouts.tensor_files import check_names, write_tensors
from paceline.methods.target_vocabulary import TOKEN_MAP, read_vocabulary

COUNT = "num_nextn_predict_layers"
CARRIES_NORM = "mtp_carries_norm"
"""A field of Paceline's own; without it the model's type decides."""
COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""Copies of the target's embedding and head beside a module."""

_MIMO = {
    "token_layernorm.weight": "enorm.weight",
    "hidden_layernorm.weight": "hnorm.weight",
    "input_proj.weight": "eh_proj.weight",
    "final_layernorm.weight": "shared_head.norm.weight",
}


def is_nextn(content: Mapping[str, Any]) -> bool:
    """Whether a `config.json` says that there are modules."""
    count = content.get(COUNT)
    return isinstance(count, int) and not isinstance(count, bool) and count > 0


def read_nextn(checkpoint: PublicCheckpoint, target: TargetFacts) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Read the modules of a model's checkpoint.

    Copies of embedding and head are left out: the drafter reads the target's. A module passes on its raw output in
    DeepSeek's models and its normed output in all others, as their engines do.

    Raises:
        CheckpointError: naming what is missing, surplus, of another shape or not supported.
    """
    public_config = checkpoint.config
    if not is_nextn({COUNT: public_config.peek(COUNT)}):
        raise public_config.error(COUNT, "must be a positive whole number")
    layers, count = public_config.size("num_hidden_layers"), public_config.size(COUNT)
    model_type = str(public_config.peek("model_type") or "")
    is_mimo = model_type.startswith("mimo")
    carries_norm = public_config.switch(CARRIES_NORM, not model_type.startswith("deepseek"))
    first = layers  # the first module's index in the tensors' names
    if is_standalone(public_config):
        public_config.expect("num_hidden_layers", 1, because="a NextN export of SGLang holds one layer")
        public_config.expect(COUNT, 1, because="a NextN export of SGLang holds one layer")
        first, layers = 0, target.num_layers
    shape = read_mlp(public_config, layers, count)
    if has_latent(public_config):
        shape |= read_sizes(public_config) | read_latent(public_config)
    else:
        source = public_config.unchecked()
        if source.get("partial_rotary_factor", 1.0) != 1.0:
            raise CheckpointError("config.json: partial_rotary_factor other than 1 is not supported")
        shape = block_shape({**source, "num_hidden_layers": 1}) | shape
    tensors: dict[str, Tensor] = {}
    for index in range(count):
        public = f"model.mtp_layers.{index}." if is_mimo else f"model.layers.{first + index}."
        found = checkpoint.tensors(prefix=public)
        if not found:
            raise CheckpointError(
                f"{checkpoint.name!r}: no tensor begins with {public}: it was saved without modules"
            )
        tensors |= {module_prefix(index) + name.removeprefix(public): value for name, value in found.items()}
    tensors = read_scaled(checkpoint.config, tensors)
    if is_mimo:
        tensors = _from_mimo(tensors)
    if (shape["target_vocab"], shape["hidden"]) != (target.vocab, target.hidden):
        raise CheckpointError(
            f"made for a target of {shape['target_vocab']} tokens and width {shape['hidden']}, "
            f"not of {target.vocab} and {target.hidden}"
        )
    shape |= {
        "num_modules": count,
        "target_layers": layers,
        "carries_norm": carries_norm,
        "qkv_bias": f"{module_prefix(0)}self_attn.q_proj.bias" in tensors,
        "head_norms": f"{module_prefix(0)}self_attn.q_norm.weight" in tensors,
    }
    for name in [name for name in tensors if name.endswith(COPIES)]:
        copy, is_head = tensors.pop(name), name.endswith(COPIES[1])
        if not torch.equal(copy, (target.head if is_head else target.embedding)(copy.dtype)):
            raise CheckpointError(
                f"{name} is no copy of the target's {'head' if is_head else 'embedding'}: a module of the nextn layout "
                "shares both with its target"
            )
    config = DrafterConfig("deepseek_mtp", target.fingerprint, target.name, shape, {"imported_from": "nextn"})
    check_names(tensors, parameter_shapes(config))
    return config, tensors


def _from_mimo(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """MiMo's tensors under DeepSeek's names, with the embedding's half of the projection first."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix, rest = name[: len("layers.0.")], name[len("layers.0.") :]
        if rest == "input_proj.weight" and tensor.ndim == 2:
            tensor = torch.cat(tensor.chunk(2, dim=1)[::-1], dim=1)
        renamed[prefix + _MIMO.get(rest, rest)] = tensor
    return renamed


def write_nextn(directory: Path, config: DrafterConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write modules in DeepSeek-V3's names, without the model that they belong to.

    Raises:
        CheckpointError: another method, or tensors that do not fit the configuration, by name.
    """
    if config.method != "deepseek_mtp":
        raise CheckpointError(f"the nextn layout holds deepseek_mtp, not {config.method!r}")
    if config.flag("reads_residual"):
        raise CheckpointError("shape.reads_residual: the nextn layout cannot say so")
    size = (config.size("target_vocab"), config.size("hidden"))
    copies = {
        name: size
        for index in range(num_modules(config))
        for copy in COPIES
        if (name := module_prefix(index) + copy) in tensors
    }
    check_names(tensors, parameter_shapes(config) | copies)
    layers = config.size("target_layers")
    content = (
        llama_config(_plain(config))
        | write_block(config)
        | {
            "architectures": ["DeepSeekMTPModel"],
            "model_type": "deepseek_mtp",
            "num_hidden_layers": layers,
            COUNT: num_modules(config),
            CARRIES_NORM: config.flag("carries_norm"),
            "torch_dtype": str(tensors[module_prefix(0) + "eh_proj.weight"].dtype).removeprefix("torch."),
        }
    )
    renamed = {}
    for name, tensor in tensors.items():
        if name == TOKEN_MAP:
            continue
        _, index, rest = name.split(".", 2)
        renamed[f"model.layers.{layers + int(index)}.{rest}"] = tensor
    write_tensors(directory, "model.safetensors", content, renamed)


def _plain(config: DrafterConfig) -> DrafterConfig:
    """The configuration with all sizes of an ordinary block; latent attention and experts have none of some."""
    heads = config.size("num_heads")
    sizes = {"num_kv_heads": heads, "head_dim": max(config.size("hidden") // heads, 1), "intermediate": 1}
    return replace(config, shape=sizes | {name: value for name, value in config.shape.items() if value})


def store_vocabulary(
    config: DrafterConfig, tensors: Mapping[str, Tensor], target_dir: Path
) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Add copies of the target's embedding and head to every module, as in DeepSeek's checkpoints."""
    dtype = tensors[module_prefix(0) + "eh_proj.weight"].dtype
    both = read_vocabulary(target_dir, config.size("target_vocab"), config.size("hidden"), dtype)
    stored = dict(tensors)
    for index in range(num_modules(config)):
        stored |= {module_prefix(index) + name: tensor for name, tensor in zip(COPIES, both, strict=True)}
    return config, stored


NEXTN = Layout(
    "nextn",
    is_nextn,
    read_nextn,
    write_nextn,
    store_vocabulary,
    precedence=1,  # the speculators format counts its module in the same field
)
