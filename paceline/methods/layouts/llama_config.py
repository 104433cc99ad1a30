"""A flat `config.json` in Llama's words, which several layouts have: a decoder layer's sizes, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.methods.checkpoint import CheckpointError, DrafterConfig
from paceline.methods.decoder_block import rope_parameters


def positive(source: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A field that is a positive whole number.

    Raises:
        CheckpointError: the value is not, or the field is absent and has no default.
    """
    value = source.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json: {name} must be a positive whole number, not {value!r}")
    return value


def block_shape(source: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of a decoder layer, as Paceline's `config.json` has them under `shape`.

    Raises:
        CheckpointError: naming the field that is missing, malformed or not supported.
    """
    if source.get("num_hidden_layers", 1) != 1:
        raise CheckpointError(f"num_hidden_layers must be 1, not {source['num_hidden_layers']!r}")
    if source.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"hidden_act must be 'silu', not {source['hidden_act']!r}")
    hidden, heads = positive(source, "hidden_size"), positive(source, "num_attention_heads")
    scaling = source.get("rope_parameters") or source.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise CheckpointError("config.json: rope_scaling must be an object or null")
    rope = {name: value for name, value in scaling.items() if name != "type"}
    rope.setdefault("rope_type", scaling.get("type", "default"))
    rope.setdefault("rope_theta", source.get("rope_theta") or 10000.0)
    shape: dict[str, Any] = {
        "hidden": hidden,
        "num_heads": heads,
        "num_kv_heads": positive(source, "num_key_value_heads", heads),
        "head_dim": positive(source, "head_dim", hidden // heads),
        "intermediate": positive(source, "intermediate_size"),
        "target_vocab": positive(source, "vocab_size"),
        "max_positions": positive(source, "max_position_embeddings", 2048),
        "rms_eps": float(source.get("rms_norm_eps", 1e-6)),
        "rope_parameters": rope,
    }
    rope_parameters(DrafterConfig("", "", shape=shape))  # raises if it is not supported
    return shape


def llama_config(config: DrafterConfig) -> dict[str, Any]:
    """The same sizes as a `config.json`."""
    rope = rope_parameters(config)
    theta = rope.pop("rope_theta")
    content: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.size("hidden"),
        "intermediate_size": config.size("intermediate"),
        "num_attention_heads": config.size("num_heads"),
        "num_key_value_heads": config.size("num_kv_heads"),
        "head_dim": config.size("head_dim"),
        "num_hidden_layers": 1,
        "vocab_size": config.size("target_vocab"),
        "max_position_embeddings": config.size("max_positions"),
        "rms_norm_eps": float(config.shape.get("rms_eps", 1e-5)),
        "rope_theta": theta,
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "tie_word_embeddings": False,
    }
    if config.flag("qkv_bias"):
        content["qkv_bias"] = True
    return content
