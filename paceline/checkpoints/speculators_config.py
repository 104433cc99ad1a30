"""The `config.json` of the speculators format, and the sizes in it.

Responsible for reading every field that decides what a drafter computes, refusing by name what Paceline's layers do not
compute, and for writing such a file. Knows no tensors. Called by `speculators.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import LlamaConfig, Qwen3Config

from paceline.checkpoints.target_facts import TargetFacts
from paceline.drafters.checkpoint import CheckpointError, DrafterConfig
from paceline.drafters.decoder_block import ROPE_TYPES, rope_parameters
from paceline.drafters.upper_block import num_layers

KINDS = {"eagle3": "eagle3", "peagle": "p_eagle"}
"""Paceline's method by `speculators_model_type`."""

ARCHITECTURES = {"eagle3": "Eagle3DraftModel", "peagle": "PEagleDraftModel"}
VERSION = "0.9.0"
"""Of the package whose layout is written."""

_LAYERS: dict[str, Callable[..., Any]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}


def read_kind(content: Mapping[str, Any]) -> str:
    """The `speculators_model_type`.

    Raises:
        CheckpointError: a drafter that is not computed here.
    """
    kind = content.get("speculators_model_type")
    if kind not in KINDS:
        raise CheckpointError(f"speculators_model_type {kind!r} is none of {', '.join(KINDS)}")
    return str(kind)


def read_shape(content: Mapping[str, Any], target: TargetFacts) -> dict[str, Any]:
    """Sizes and switches, as Paceline's `config.json` has them under `shape`.

    Args:
        content: the checkpoint's `config.json`.
        target: what it was made for.

    Raises:
        CheckpointError: naming the field that is missing, does not fit the target, or asks for what is not computed.
    """
    kind = read_kind(content)
    layer = _layer_config(content)
    for name in ("norm_before_fc", "fc_norm"):
        if content.get(name):
            raise CheckpointError(
                f"{name}: a norm before `fc` is not computed: `fc` runs on the target's side, where only a product can"
            )
    hidden = _size(layer, "hidden_size")
    if content.get("target_hidden_size") not in (None, hidden):
        raise CheckpointError(
            "target_hidden_size differs from the drafter's hidden_size, which is not supported"
        )
    if hidden != target.hidden:
        raise CheckpointError(
            f"transformer_layer_config.hidden_size is {hidden}, the target's is {target.hidden}: it is another's"
        )
    vocab = _size(layer, "vocab_size")
    if vocab != target.vocab:
        raise CheckpointError(
            f"transformer_layer_config.vocab_size is {vocab}, the target's is {target.vocab}: it is another's"
        )
    draft_vocab = content.get("draft_vocab_size", 32000)
    if not _is_whole(draft_vocab) or draft_vocab > vocab:
        raise CheckpointError(f"draft_vocab_size must be from 1 to {vocab}, not {draft_vocab!r}")
    heads = _size(layer, "num_attention_heads")
    kv_heads = _size(layer, "num_key_value_heads")
    if heads % kv_heads:
        raise CheckpointError(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    shape: dict[str, Any] = {
        "hidden": hidden,
        "target_hidden": hidden,
        "num_layers": _size(layer, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": _size(layer, "head_dim") if getattr(layer, "head_dim", None) else hidden // heads,
        "intermediate": _size(layer, "intermediate_size"),
        "draft_vocab": draft_vocab,
        "target_vocab": vocab,
        "rms_eps": float(layer.rms_norm_eps),
        "max_positions": _size(layer, "max_position_embeddings"),
        "tap_layers": _tap_layers(content, target),
        "norm_before_residual": _switch(content, "norm_before_residual"),
        "norm_output": _switch(content, "norm_output"),
        "head_norms": layer.model_type == "qwen3",
        **_rope(layer),
    }
    if kind == "peagle":
        shape |= {"num_depths": _num_depths(content), "mask_token": _mask_token(content, vocab)}
        del shape["norm_output"]  # it says what a layer goes on from, and this one never goes on
    return shape


def write_config(config: DrafterConfig) -> dict[str, Any]:
    """A `config.json` that the package speculators and vLLM read.

    Args:
        config: Paceline's; its `target_name`, where there is one, is the verifier that is named.

    Raises:
        CheckpointError: naming what the format cannot express.
    """
    kinds = {method: kind for kind, method in KINDS.items()}
    if config.method not in kinds:
        raise CheckpointError(f"method {config.method!r} has no place in the speculators format")
    kind, shape = kinds[config.method], config.shape
    if config.size("target_hidden") != config.size("hidden"):
        raise CheckpointError(
            "shape.hidden differs from shape.target_hidden, which the speculators format cannot say"
        )
    if config.flag("qkv_bias"):
        raise CheckpointError("shape.qkv_bias: the speculators format has biases on all of attention or none")
    head_norms = config.flag("head_norms")
    layer = _LAYERS["qwen3" if head_norms else "llama"](
        hidden_size=config.size("hidden"),
        intermediate_size=config.size("intermediate"),
        num_hidden_layers=num_layers(config),
        num_attention_heads=config.size("num_heads"),
        num_key_value_heads=config.size("num_kv_heads"),
        head_dim=config.size("head_dim"),
        vocab_size=config.size("target_vocab"),
        max_position_embeddings=config.size("max_positions"),
        rms_norm_eps=float(shape.get("rms_eps", 1e-5)),
        rope_parameters=rope_parameters(config),
        hidden_act="silu",
        tie_word_embeddings=False,
    )
    written = layer.to_dict()
    for name in ("transformers_version", "architectures", "_name_or_path", "dtype"):
        written.pop(name, None)
    depth = config.size("num_depths") if kind == "peagle" else 3
    out: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": depth,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": config.target_name or None, "architectures": []},
        },
        "transformer_layer_config": written,
        "draft_vocab_size": config.size("draft_vocab"),
        "eagle_aux_hidden_state_layer_ids": list(shape["tap_layers"]),
        "norm_before_residual": config.flag("norm_before_residual"),
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": config.flag("norm_output"),
        "target_hidden_size": None,
        "embed_requires_grad": kind == "peagle",
    }
    if kind == "peagle":
        out["mask_token_id"] = shape["mask_token"]
    return out


def _layer_config(content: Mapping[str, Any]) -> Any:
    """The decoder layers' configuration, with what is left out filled in as the package does."""
    value = content.get("transformer_layer_config")
    if not isinstance(value, dict):
        raise CheckpointError("transformer_layer_config is missing")
    model_type = value.get("model_type", "qwen3")
    if model_type not in _LAYERS:
        raise CheckpointError(
            f"transformer_layer_config.model_type {model_type!r} is none of {', '.join(_LAYERS)}"
        )
    fields = {
        name: entry for name, entry in value.items() if name not in ("model_type", "dtype", "torch_dtype")
    }
    try:
        layer = _LAYERS[model_type](**fields)
    except Exception as error:  # whatever a file from elsewhere makes of another library's checks
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


def _rope(layer: Any) -> dict[str, Any]:
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


def _tap_layers(content: Mapping[str, Any], target: TargetFacts) -> list[int]:
    """Layers whose entering streams are read: what the format's ids mean, and Paceline's."""
    layers = content.get("eagle_aux_hidden_state_layer_ids")
    if layers is None:
        layers = [2, target.num_layers // 2, target.num_layers - 3]
    if (
        not isinstance(layers, list)
        or not layers
        or not all(
            isinstance(i, int) and not isinstance(i, bool) and 0 <= i <= target.num_layers for i in layers
        )
        or len(set(layers)) != len(layers)
    ):
        raise CheckpointError(
            f"eagle_aux_hidden_state_layer_ids {layers!r} are not distinct layers from 0 to {target.num_layers}"
        )
    return layers


def _num_depths(content: Mapping[str, Any]) -> int:
    """Depths trained: named in older files, else the tokens that the default proposal asks for."""
    for name in ("num_depths", "para_depths"):
        if _is_whole(content.get(name)):
            return int(content[name])
    settings = content.get("speculators_config")
    methods = settings.get("proposal_methods") if isinstance(settings, Mapping) else None
    if isinstance(methods, list) and methods and isinstance(methods[0], Mapping):
        count = methods[0].get("speculative_tokens")
        if isinstance(count, int) and _is_whole(count):
            return count
    raise CheckpointError(
        "speculators_config.proposal_methods names no speculative_tokens: how long are its drafts?"
    )


def _mask_token(content: Mapping[str, Any], vocab: int) -> int:
    for name in ("mask_token_id", "ptd_token_id"):
        token = content.get(name)
        if token is None:
            continue
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
            raise CheckpointError(f"{name} must be a token from 0 to {vocab - 1}, not {token!r}")
        return token
    raise CheckpointError("neither mask_token_id nor ptd_token_id says which token stands for an unknown one")


def _switch(content: Mapping[str, Any], name: str) -> bool:
    value = content.get(name, False)
    if not isinstance(value, bool):
        raise CheckpointError(f"{name} must be true or false, not {value!r}")
    return value


def _size(layer: Any, name: str) -> int:
    value = getattr(layer, name, None)
    if not isinstance(value, int) or not _is_whole(value):
        raise CheckpointError(
            f"transformer_layer_config.{name} must be a positive whole number, not {value!r}"
        )
    return value


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
