"""P-EAGLE's own layout: a flat `config.json` with a parallel drafting token, as its authors publish it for vLLM.

The fused layer is `midlayer.*`, the plain layers above it `layers.1.*` and so on. The drafter's embedding and head, the
shared feature of mask rows and both vocabulary maps are always stored. Layer ids name the streams that *enter* a layer;
absent ids mean vLLM's default. Fields mean the same as in the speculators format, whose code checks them.

Files that others trained in this layout differ in details, and all variants are read: the fused layer as `layers.0.*`,
the prefix `model.`, a flat `mask_hidden`, no `t2d`, other names of the mask token.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.methods.checkpoint import CheckpointError, DrafterConfig
from paceline.methods.decoder_block import num_layers
from paceline.methods.eagle.layout import AUXILIARY_LAYERS
from paceline.methods.layouts.layout import Layout
from paceline.methods.layouts.llama_config import llama_config
from paceline.methods.layouts.public_checkpoint import PublicCheckpoint
from paceline.methods.layouts.target_facts import TargetFacts
from paceline.methods.layouts.tensor_files import check_names, write_tensors
from paceline.methods.p_eagle.drafter import p_eagle_shapes
from paceline.methods.speculators.layout import read_content

TOKEN_NAMES = ("mask_token_id", "pard_token", "ptd_token_id")
"""Fields that may name the token of mask rows; vLLM takes the first of them."""

DEFAULT_DEPTHS = 8
"""Depths of a drafter whose file does not say them; no published one was trained for fewer."""

_FUSED, _PUBLIC_FUSED, _WRAPPED = "midlayer.", "layers.0.", "model."


def is_p_eagle(content: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of this layout."""
    return "speculators_model_type" not in content and (
        content.get("parallel_drafting") is True or "ptd_token_id" in content
    )


def read_p_eagle(
    checkpoint: PublicCheckpoint, target: TargetFacts
) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Read a checkpoint of the layout.

    Raises:
        CheckpointError: naming a field or tensor that is missing, surplus, of another size, or asks for what the
            drafter does not compute.
    """
    source, tensors = checkpoint.config.unchecked(), _renamed(checkpoint.tensors())
    if "mask_hidden" not in tensors:
        raise CheckpointError("mask_hidden is missing: the feature of mask rows")
    tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, 1, -1)
    has_bias = _PUBLIC_FUSED + "self_attn.q_proj.bias" in tensors
    own = source.get("eagle_config")
    within = own if isinstance(own, Mapping) else {}
    if within.get("use_aux_hidden_state") is False:
        raise CheckpointError("eagle_config.use_aux_hidden_state: a drafter of one stream is not computed")
    vocab = source.get("vocab_size")
    draft_vocab = source.get("draft_vocab_size")
    content = {
        **source,
        "speculators_model_type": "peagle",
        "transformer_layer_config": {
            **source,
            "model_type": source.get("model_type", "llama"),
            "attention_bias": False,  # the tensors show it
        },
        "draft_vocab_size": vocab if draft_vocab is None else draft_vocab,
        "mask_token_id": next((source[name] for name in TOKEN_NAMES if source.get(name) is not None), None),
        AUXILIARY_LAYERS: source.get(AUXILIARY_LAYERS, within.get(AUXILIARY_LAYERS)),
    }
    if not {"num_depths", "para_depths"} & set(source):
        content["num_depths"] = DEFAULT_DEPTHS
    if "t2d" not in tensors and "d2t" in tensors:
        tensors["t2d"] = _marks(tensors["d2t"], target.vocab)
    more = {"qkv_bias": True} if has_bias else {}
    try:
        return read_content(
            checkpoint.directory, content, target, {"imported_from": "p_eagle"}, tensors, more
        )
    except CheckpointError as error:
        raise CheckpointError(str(error).replace("transformer_layer_config.", "config.json: ")) from None


def write_p_eagle(directory: Path, config: DrafterConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint of the layout.

    Raises:
        CheckpointError: another method, a field that the layout cannot express, or tensors that do not fit the
            configuration.
    """
    if config.method != "p_eagle":
        raise CheckpointError(f"P-EAGLE's layout holds p_eagle, not {config.method!r}")
    if config.flag("head_norms"):
        raise CheckpointError(
            "shape.head_norms: P-EAGLE's layout has Llama layers; the speculators format has more"
        )
    if config.size("target_hidden") != config.size("hidden"):
        raise CheckpointError(
            "shape.hidden differs from shape.target_hidden, which P-EAGLE's layout cannot say"
        )
    check_names(tensors, p_eagle_shapes(config))
    content = llama_config(config) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": num_layers(config),
        "draft_vocab_size": config.size("draft_vocab"),
        AUXILIARY_LAYERS: list(config.shape["tap_layers"]),
        "norm_before_residual": config.flag("norm_before_residual"),
        "attention_bias": config.flag("qkv_bias"),
        "parallel_drafting": True,
        "ptd_token_id": config.shape["mask_token"],
        "num_depths": config.size("num_depths"),
        "torch_dtype": str(tensors["fc.weight"].dtype).removeprefix("torch."),
    }
    write_tensors(directory, "model.safetensors", content, tensors)


def _renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names of the speculators format."""
    renamed = {}
    for name, tensor in tensors.items():
        bare = name.removeprefix(_WRAPPED)
        renamed[_PUBLIC_FUSED + bare[len(_FUSED) :] if bare.startswith(_FUSED) else bare] = tensor
    if len(renamed) < len(tensors):
        raise CheckpointError("two tensors have one name, but for what stands before it")
    return renamed


def _marks(offsets: Tensor, vocab: int) -> Tensor:
    """Which target ids `d2t` names, bool `[vocab]`; ids outside of the vocabulary are refused later."""
    ids = offsets.to(torch.int64) + torch.arange(offsets.shape[0])
    marks = torch.zeros(vocab, dtype=torch.bool)
    marks[ids[(ids >= 0) & (ids < vocab)]] = True
    return marks


P_EAGLE = Layout("p_eagle", is_p_eagle, read_p_eagle, write_p_eagle)
