"""Gemma 4's assistant models as transformers saves them (`model_type` `gemma4_assistant`), read and checked.

Responsible for the layout alone: sizes from `config.json`, every tensor by name and shape. A head that is stored beside
the embedding it is tied to is left out. Not in the table of formats: these models are not served yet, see
docs/methods/gemma4_mtp.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoints.tensor_files import check_names, read_public_config, read_tensors
from paceline.drafters.checkpoint import CheckpointError
from paceline.drafters.gemma4_mtp_model import FULL, SLIDING, Gemma4MtpShape

_HEAD = "lm_head.weight"
_ORDER = "masked_embedding.token_ordering"


def read_gemma4_assistant(directory: Path) -> tuple[Gemma4MtpShape, dict[str, Tensor]]:
    """Sizes and tensors of a checkpoint.

    Raises:
        CheckpointError: naming what is missing, surplus, of another shape or not supported.
    """
    source = read_public_config(directory)
    if source.get("model_type") != "gemma4_assistant":
        raise CheckpointError(
            f"config.json: model_type must be 'gemma4_assistant', not {source.get('model_type')!r}"
        )
    shape, tensors = _shape(source), read_tensors(directory)
    tensors.pop(_HEAD, None)
    check_names(tensors, shape.parameter_shapes())
    if shape.num_clusters:
        order = tensors[_ORDER].to(torch.int64)
        if not torch.equal(order.sort().values, torch.arange(shape.vocab)):
            raise CheckpointError(f"{_ORDER} does not name every token once")
        tensors[_ORDER] = order
    return shape, tensors


def _shape(source: Mapping[str, Any]) -> Gemma4MtpShape:
    text = source.get("text_config")
    if not isinstance(text, Mapping):
        raise CheckpointError("config.json: text_config is missing")
    for name, wanted in (
        ("hidden_activation", "gelu_pytorch_tanh"),
        ("attention_bias", False),
        ("hidden_size_per_layer_input", 0),
        ("enable_moe_block", False),
        ("use_double_wide_mlp", False),
        ("num_kv_shared_layers", text.get("num_hidden_layers")),
    ):
        if text.get(name, wanted) != wanted:
            raise CheckpointError(f"text_config.{name} must be {wanted!r}, not {text[name]!r}")
    types = text.get("layer_types")
    if (
        not isinstance(types, list)
        or len(types) != text.get("num_hidden_layers")
        or set(types) - {SLIDING, FULL}
    ):
        raise CheckpointError(f"text_config.layer_types must say {SLIDING} or {FULL} for every layer")
    ropes = text.get("rope_parameters") or {
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    }
    for kind in set(types):
        rope = ropes.get(kind)
        if not isinstance(rope, Mapping) or rope.get("rope_type") not in ("default", "proportional"):
            raise CheckpointError(f"text_config.rope_parameters.{kind} must be default or proportional")
        if rope.get("factor", 1.0) != 1.0:
            raise CheckpointError(f"text_config.rope_parameters.{kind}.factor is not supported")
    vocab = _size(text, "vocab_size")
    clusters = selected = 0
    if source.get("use_ordered_embeddings"):
        clusters, selected = _size(source, "num_centroids"), _size(source, "centroid_intermediate_top_k")
        if vocab % clusters or selected > clusters:
            raise CheckpointError(
                f"num_centroids {clusters} must divide {vocab} tokens and be at least {selected}"
            )
    return Gemma4MtpShape(
        backbone=_size(source, "backbone_hidden_size"),
        hidden=_size(text, "hidden_size"),
        intermediate=_size(text, "intermediate_size"),
        vocab=vocab,
        num_heads=_size(text, "num_attention_heads"),
        layer_types=tuple(types),
        head_dims={SLIDING: _size(text, "head_dim"), FULL: _full_head_dim(text, types)},
        sliding_window=_size(text, "sliding_window"),
        rope_thetas={kind: float(ropes[kind].get("rope_theta", 1e4)) for kind in set(types)},
        rotary_shares={
            kind: float(ropes[kind].get("partial_rotary_factor", 1.0))
            if ropes[kind]["rope_type"] == "proportional"
            else 1.0
            for kind in set(types)
        },
        rms_eps=float(text.get("rms_norm_eps", 1e-6)),
        num_clusters=clusters,
        num_selected=selected,
    )


def _full_head_dim(text: Mapping[str, Any], types: list[str]) -> int:
    """Published as `global_head_dim`; newer versions of transformers write overrides layer by layer."""
    if "global_head_dim" in text:
        return _size(text, "global_head_dim")
    overrides = text.get("per_layer_config") or {}
    found = {
        str(index): override["head_dim"]
        for index, override in overrides.items()
        if isinstance(override, Mapping) and "head_dim" in override
    }
    widths = {found.get(str(index)) for index, kind in enumerate(types) if kind == FULL}
    if not widths or widths == {None}:
        return 512
    if len(widths) != 1:
        raise CheckpointError("text_config.per_layer_config: full layers with heads of several widths")
    return _size({"head_dim": widths.pop()}, "head_dim")


def _size(source: Mapping[str, Any], name: str) -> int:
    value = source.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json: {name} must be a positive whole number, not {value!r}")
    return value
