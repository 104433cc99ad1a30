"""The configuration of the decoder layers in a `config.json` of the speculators layout, read and checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import LlamaConfig, Qwen3Config

from paceline.methods.checkpoint import CheckpointError
from paceline.methods.decoder_block import ROPE_TYPES
from paceline.methods.layouts.target_facts import TargetFacts
from paceline.methods.speculators.fields import size_of

LAYERS: dict[str, Callable[..., Any]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
"""Configuration class by `model_type`."""


def check_sizes(layer: Any, target: TargetFacts) -> tuple[int, int]:
    """Query and key heads of layers that fit a target.

    Raises:
        CheckpointError: the layers are another target's, or heads do not fall into groups.
    """
    hidden, vocab = size_of(layer, "hidden_size"), size_of(layer, "vocab_size")
    if hidden != target.hidden:
        raise CheckpointError(
            f"transformer_layer_config.hidden_size is {hidden}, the target's is {target.hidden}: it is another's"
        )
    if vocab != target.vocab:
        raise CheckpointError(
            f"transformer_layer_config.vocab_size is {vocab}, the target's is {target.vocab}: it is another's"
        )
    heads, kv_heads = size_of(layer, "num_attention_heads"), size_of(layer, "num_key_value_heads")
    if heads % kv_heads:
        raise CheckpointError(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    return heads, kv_heads


def layer_config(content: Mapping[str, Any]) -> Any:
    """The decoder layers' configuration, with the package's defaults for absent fields."""
    value = content.get("transformer_layer_config")
    if not isinstance(value, dict):
        raise CheckpointError("transformer_layer_config is missing")
    model_type = value.get("model_type", "qwen3")
    if model_type not in LAYERS:
        raise CheckpointError(
            f"transformer_layer_config.model_type {model_type!r} is none of {', '.join(LAYERS)}"
        )
    fields = {
        name: entry for name, entry in value.items() if name not in ("model_type", "dtype", "torch_dtype")
    }
    try:
        layer = LAYERS[model_type](**fields)
    except Exception as error:  # another library's checks on a foreign file may raise anything
        raise CheckpointError(f"transformer_layer_config: {error}") from None
    for name in ("attention_bias", "mlp_bias"):
        if getattr(layer, name, False):
            raise CheckpointError(f"transformer_layer_config.{name}: biases are not computed")
    if layer.hidden_act != "silu":
        raise CheckpointError(f"transformer_layer_config.hidden_act {layer.hidden_act!r} is not silu")
    kinds = set(getattr(layer, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        raise CheckpointError(
            f"transformer_layer_config.layer_types: {', '.join(sorted(map(str, kinds)))} is not computed"
        )
    return layer


def rope_fields(layer: Any) -> dict[str, Any]:
    """Fields of `shape` about rotary positions.

    Raises:
        CheckpointError: the variant is not supported.
    """
    parameters = layer.rope_parameters
    if not isinstance(parameters, Mapping) or parameters.get("rope_type") not in ROPE_TYPES:
        said = parameters.get("rope_type") if isinstance(parameters, Mapping) else parameters
        raise CheckpointError(
            f"transformer_layer_config.rope_parameters: rope_type {said!r} is none of {', '.join(ROPE_TYPES)}"
        )
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(
            "transformer_layer_config.rope_parameters: partial_rotary_factor is not supported"
        )
    if parameters["rope_type"] == "default":
        return {"rope_theta": float(parameters["rope_theta"])}
    return {"rope_parameters": dict(parameters)}
