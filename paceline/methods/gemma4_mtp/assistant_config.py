"""The `config.json` of Gemma 4's assistant models: its sizes, checked. Called by `assistant.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from paceline.methods.checkpoint import CheckpointError
from paceline.methods.gemma4_mtp.layer import positive
from paceline.methods.gemma4_mtp.model import FULL, SLIDING, Gemma4MtpShape


def read_shape_of(source: Mapping[str, Any]) -> Gemma4MtpShape:
    """Sizes of a checkpoint.

    Raises:
        CheckpointError: naming the field that is missing, malformed or not supported.
    """
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
        or any(kind not in (SLIDING, FULL) for kind in types)
    ):
        raise CheckpointError(f"text_config.layer_types must say {SLIDING} or {FULL} for every layer")
    ropes = text.get("rope_parameters") or {
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    }
    for kind in set(types):
        rope = ropes.get(kind) if isinstance(ropes, Mapping) else None
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
        rope_thetas={kind: _of_rope(ropes, kind, "rope_theta", 1e4) for kind in set(types)},
        rotary_fractions={
            kind: _of_rope(ropes, kind, "partial_rotary_factor", 1.0, most=1)
            if ropes[kind]["rope_type"] == "proportional"
            else 1.0
            for kind in set(types)
        },
        rms_eps=positive(text.get("rms_norm_eps", 1e-6), "text_config.rms_norm_eps"),
        num_clusters=clusters,
        num_selected=selected,
    )


def _of_rope(
    ropes: Mapping[str, Mapping[str, Any]], kind: str, name: str, default: float, most: float = math.inf
) -> float:
    return positive(ropes[kind].get(name, default), f"text_config.rope_parameters.{kind}.{name}", most)


def _full_head_dim(text: Mapping[str, Any], types: list[str]) -> int:
    """Published as `global_head_dim`; newer versions of transformers write overrides layer by layer."""
    if "global_head_dim" in text:
        return _size(text, "global_head_dim")
    overrides = text.get("per_layer_config") or {}
    if not isinstance(overrides, Mapping):
        raise CheckpointError("text_config.per_layer_config must go by layer")
    found = {
        str(index): _size(override, "head_dim")
        for index, override in overrides.items()
        if isinstance(override, Mapping) and "head_dim" in override
    }
    widths = {found.get(str(index), 512) for index, kind in enumerate(types) if kind == FULL}
    if len(widths) > 1:
        raise CheckpointError("text_config.per_layer_config: full layers with heads of several widths")
    return widths.pop() if widths else 512


def _size(source: Mapping[str, Any], name: str) -> int:
    value = source.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json: {name} must be a positive whole number, not {value!r}")
    return value
