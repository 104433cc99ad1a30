"""EAGLE's own layout (SafeAILab): a flat `config.json` in Llama's words and one `model.safetensors`.

Responsible for the layout of EAGLE-1, which EAGLE-2 shares, and of EAGLE-3. No field of the configuration tells them
apart; the tensors do. Nothing is unpickled. Called by the commands that import and export checkpoints.

Not in the layout, and so lost by an export: the target's fingerprint, how the drafter was trained, the measured
accuracies that shape static trees, and which part of the vocabulary EAGLE-1 proposes: others let it propose all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoints.target_facts import TargetFacts
from paceline.checkpoints.tensor_files import check_names, read_public_config, read_tensors, write_tensors
from paceline.methods.checkpoint import CheckpointError, DrafterConfig
from paceline.methods.decoder_block import num_layers, rope_parameters
from paceline.methods.eagle1 import layer as eagle1_layer
from paceline.methods.eagle3 import layer as eagle3_layer
from paceline.methods.target_vocabulary import TOKEN_MAP
from paceline.training.teacher import default_tap_layers

FILE = "model.safetensors"
EMBEDDING = "embed_tokens.weight"
AUXILIARY_LAYERS = "eagle_aux_hidden_state_layer_ids"

SHAPES: dict[str, Callable[[DrafterConfig], dict[str, tuple[int, ...]]]] = {
    "eagle1": eagle1_layer.parameter_shapes,
    "eagle2": eagle1_layer.parameter_shapes,
    "eagle3": eagle3_layer.parameter_shapes,
}


def is_eagle(content: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of this layout: one Llama layer, and no other format's mark."""
    return (
        "speculators_model_type" not in content
        and content.get("model_type", "llama") == "llama"
        and "hidden_size" in content
        and content.get("num_hidden_layers", 1) == 1
    )


def read_eagle(directory: Path, target: TargetFacts) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Read a checkpoint of EAGLE-1 (method `eagle1`) or EAGLE-3 (`eagle3`).

    An embedding in the file is left out: the drafter reads the target's, of which it is a frozen copy. Without ids of
    auxiliary layers in the configuration, EAGLE-3 reads layers 2, L // 2 and L - 3 of the target's L; ids mean the
    layers that the streams enter, as in EAGLE's own code.

    Args:
        directory: with `config.json` and safetensors.
        target: what the drafter was made for.

    Raises:
        CheckpointError: naming what is missing, surplus, of another shape or not supported.
    """
    source, tensors = read_public_config(directory), read_tensors(directory)
    if any(name.startswith("midlayer.") for name in tensors):
        method = "eagle3"
    elif any(name.startswith("layers.0.") for name in tensors):
        method = "eagle1"
    else:
        raise CheckpointError(
            f"{directory.name!r}: neither layers.0.* (EAGLE-1) nor midlayer.* (EAGLE-3) is there"
        )
    shape = block_shape(source)
    if method == "eagle1":
        width = shape["hidden"]
        shape |= _eagle1_shape(source, tensors)
    else:
        shape |= _eagle3_shape(source, tensors, target)
        width = shape["target_hidden"]
    if (shape["target_vocab"], width) != (target.vocab, target.hidden):
        raise CheckpointError(
            f"made for a target of {shape['target_vocab']} tokens and width {width}, "
            f"not of {target.vocab} and {target.hidden}"
        )
    config = DrafterConfig(method, target.fingerprint, target.name, shape, {"imported_from": "eagle"})
    if EMBEDDING in tensors:
        found = tuple(tensors.pop(EMBEDDING).shape)
        if found != (target.vocab, width):
            raise CheckpointError(f"{EMBEDDING} has shape {found}, not {(target.vocab, width)}")
    if method == "eagle3" and shape["draft_vocab"] == target.vocab and not {"d2t", "t2d"} & set(tensors):
        # A whole vocabulary needs no map, and the layout has none.
        tensors["d2t"] = torch.zeros(target.vocab, dtype=torch.int64)
        tensors["t2d"] = torch.ones(target.vocab, dtype=torch.bool)
    check_names(tensors, SHAPES[method](config))
    return config, tensors


def write_eagle(directory: Path, config: DrafterConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint of `eagle1`, `eagle2` or `eagle3`.

    Raises:
        CheckpointError: another method, or tensors that do not fit the configuration, by name.
    """
    if config.method not in SHAPES:
        raise CheckpointError(f"EAGLE's layout holds {', '.join(SHAPES)}, not {config.method!r}")
    for flag in ("norm_before_residual", "norm_output", "head_norms"):
        if config.flag(flag):
            raise CheckpointError(f"shape.{flag}: EAGLE's layout cannot say so; the speculators format can")
    if num_layers(config) > 1:
        raise CheckpointError(
            f"shape.num_layers: EAGLE's layout has one layer, not {num_layers(config)}; the speculators format has more"
        )
    check_names(tensors, SHAPES[config.method](config))
    content = llama_config(config)
    content["torch_dtype"] = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    kept = {name: tensor for name, tensor in tensors.items() if name != TOKEN_MAP}
    if config.method == "eagle3":
        content |= {
            "draft_vocab_size": config.size("draft_vocab"),
            AUXILIARY_LAYERS: list(eagle3_layer.tap_layers(config)),
        }
        if config.size("target_hidden") != config.size("hidden"):
            content["target_hidden_size"] = config.size("target_hidden")
        if config.size("draft_vocab") == config.size("target_vocab") and not bool(kept["d2t"].any()):
            del kept["d2t"], kept["t2d"]
    else:
        content["bias"] = config.flag("fc_bias")
    write_tensors(directory, FILE, content, kept)


def _positive(source: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = source.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json: {name} must be a positive whole number, not {value!r}")
    return value


def block_shape(source: Mapping[str, Any]) -> dict[str, Any]:
    """What all methods read from a configuration in Llama's words."""
    if source.get("num_hidden_layers", 1) != 1:
        raise CheckpointError(f"num_hidden_layers must be 1, not {source['num_hidden_layers']!r}")
    if source.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"hidden_act must be 'silu', not {source['hidden_act']!r}")
    hidden, heads = _positive(source, "hidden_size"), _positive(source, "num_attention_heads")
    scaling = source.get("rope_parameters") or source.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise CheckpointError("config.json: rope_scaling must be an object or null")
    rope = {name: value for name, value in scaling.items() if name != "type"}
    rope.setdefault("rope_type", scaling.get("type", "default"))
    rope.setdefault("rope_theta", source.get("rope_theta") or 10000.0)
    shape: dict[str, Any] = {
        "hidden": hidden,
        "num_heads": heads,
        "num_kv_heads": _positive(source, "num_key_value_heads", heads),
        "head_dim": _positive(source, "head_dim", hidden // heads),
        "intermediate": _positive(source, "intermediate_size"),
        "target_vocab": _positive(source, "vocab_size"),
        "max_positions": _positive(source, "max_position_embeddings", 2048),
        "rms_eps": float(source.get("rms_norm_eps", 1e-6)),
        "rope_parameters": rope,
    }
    rope_parameters(DrafterConfig("", "", shape=shape))  # refuses what is not supported
    return shape


def _eagle1_shape(source: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    # The published loader takes a bias unless `bias` says otherwise; files made by others have none and say nothing.
    has_bias = source.get("bias", "fc.bias" in names)
    qkv_bias = source.get("qkv_bias", "layers.0.self_attn.q_proj.bias" in names)
    return {"fc_bias": bool(has_bias), "qkv_bias": bool(qkv_bias)}


def _eagle3_shape(source: Mapping[str, Any], names: Collection[str], target: TargetFacts) -> dict[str, Any]:
    layers = source.get(AUXILIARY_LAYERS)
    if layers is None:
        if not target.num_layers:
            raise CheckpointError(
                f"config.json: no {AUXILIARY_LAYERS}, and the target's layers are not known"
            )
        layers = default_tap_layers(target.num_layers)
    vocab = _positive(source, "vocab_size")
    return {
        "target_hidden": _positive(source, "target_hidden_size", _positive(source, "hidden_size")),
        "draft_vocab": _positive(source, "draft_vocab_size", vocab),
        "tap_layers": list(layers),
        "qkv_bias": "midlayer.self_attn.q_proj.bias" in names,
    }


def llama_config(config: DrafterConfig) -> dict[str, Any]:
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
