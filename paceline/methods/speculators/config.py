"""The `config.json` of the speculators format, and the sizes in it.

Responsible for reading every field that decides what a drafter computes, refusing by name what Paceline's layers do not
compute, and for writing such a file; fields that only block drafters have are in `speculators_blocks.py`. Knows no
tensors. Called by `speculators.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import LlamaConfig, Qwen3Config

from paceline.methods.checkpoint import CheckpointError, DrafterConfig
from paceline.methods.decoder_block import ROPE_TYPES, num_layers, rope_parameters
from paceline.methods.dflash.layer import BlockPlan
from paceline.methods.layouts.target_facts import TargetFacts
from paceline.methods.speculators.block_fields import read_block_fields, write_block_fields
from paceline.methods.speculators.fields import is_whole, mask_token, size_of, switch

KINDS = {"eagle3": "eagle3", "peagle": "p_eagle", "dflash": "dflash", "dspark": "dspark"}
"""Paceline's method by `speculators_model_type`."""

BLOCK_KINDS = ("dflash", "dspark")
"""Those that propose a block, in layers with norms of queries and keys, with the target's embedding and head."""

ARCHITECTURES = {
    "eagle3": "Eagle3DraftModel",
    "peagle": "PEagleDraftModel",
    "dflash": "DFlashDraftModel",
    "dspark": "DSparkDraftModel",
}
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
    layer = layer_config(content)
    for name in ("norm_before_fc", "fc_norm"):
        if content.get(name):
            raise CheckpointError(
                f"{name}: a norm before `fc` is not computed: `fc` runs on the target's side, where only a product can"
            )
    hidden = size_of(layer, "hidden_size")
    if content.get("target_hidden_size") not in (None, hidden):
        raise CheckpointError(
            "target_hidden_size differs from the drafter's hidden_size, which is not supported"
        )
    heads, kv_heads = check_sizes(layer, target)
    vocab = target.vocab
    draft_vocab = content.get("draft_vocab_size", 32000)
    if not is_whole(draft_vocab) or draft_vocab > vocab:
        raise CheckpointError(f"draft_vocab_size must be from 1 to {vocab}, not {draft_vocab!r}")
    shape: dict[str, Any] = {
        "hidden": hidden,
        "target_hidden": hidden,
        "num_layers": size_of(layer, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": size_of(layer, "head_dim") if getattr(layer, "head_dim", None) else hidden // heads,
        "intermediate": size_of(layer, "intermediate_size"),
        "draft_vocab": draft_vocab,
        "target_vocab": vocab,
        "rms_eps": float(layer.rms_norm_eps),
        "max_positions": size_of(layer, "max_position_embeddings"),
        "tap_layers": _tap_layers(content, kind, target),
        "head_norms": kind in BLOCK_KINDS or layer.model_type == "qwen3",
        **rope_fields(layer),
    }
    if kind in BLOCK_KINDS:
        return shape | read_block_fields(content, kind, vocab)
    shape["norm_before_residual"] = switch(content, "norm_before_residual")
    if kind == "peagle":
        return shape | {"num_depths": _num_depths(content), "mask_token": mask_token(content, vocab)}
    shape["norm_output"] = switch(content, "norm_output")
    return shape


def check_sizes(layer: Any, target: TargetFacts) -> tuple[int, int]:
    """Query and key heads of layers that fit a target.

    Raises:
        CheckpointError: they are another target's, or heads do not fall into groups.
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
    if kind in BLOCK_KINDS and not head_norms:
        raise CheckpointError(
            "shape.head_norms: the speculators format has such blocks with norms of heads alone"
        )
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
                    "speculative_tokens": _num_drafts(config, kind),
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": config.target_name or None, "architectures": []},
        },
        "transformer_layer_config": written,
        "draft_vocab_size": config.size("draft_vocab"),
        _taps_field(kind): list(shape["tap_layers"]),
        "target_hidden_size": None,
    }
    if kind in BLOCK_KINDS:
        return out | write_block_fields(config, kind)
    out |= {
        "norm_before_residual": config.flag("norm_before_residual"),
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": config.flag("norm_output"),
        "embed_requires_grad": kind == "peagle",
    }
    if kind == "peagle":
        out["mask_token_id"] = shape["mask_token"]
    return out


def _num_drafts(config: DrafterConfig, kind: str) -> int:
    if kind in BLOCK_KINDS:
        return BlockPlan.read(config).num_drafts
    return config.size("num_depths") if kind == "peagle" else 3


def layer_config(content: Mapping[str, Any]) -> Any:
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


def rope_fields(layer: Any) -> dict[str, Any]:
    """What `shape` says of rotary positions.

    Raises:
        CheckpointError: of a variant that is not supported.
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


def _taps_field(kind: str) -> str:
    return "aux_hidden_state_layer_ids" if kind in BLOCK_KINDS else "eagle_aux_hidden_state_layer_ids"


def _tap_layers(content: Mapping[str, Any], kind: str, target: TargetFacts) -> list[int]:
    """Layers whose entering streams are read: what the format's ids mean, and Paceline's."""
    field = _taps_field(kind)
    layers = content.get(field)
    if layers is None and kind not in BLOCK_KINDS:
        layers = [2, target.num_layers // 2, target.num_layers - 3]
    if (
        not isinstance(layers, list)
        or not layers
        or not all(
            isinstance(i, int) and not isinstance(i, bool) and 0 <= i <= target.num_layers for i in layers
        )
        or len(set(layers)) != len(layers)
    ):
        raise CheckpointError(f"{field} {layers!r} are not distinct layers from 0 to {target.num_layers}")
    return layers


def _num_depths(content: Mapping[str, Any]) -> int:
    """Depths trained: named in older files, else the tokens that the default proposal asks for."""
    for name in ("num_depths", "para_depths"):
        if is_whole(content.get(name)):
            return int(content[name])
    settings = content.get("speculators_config")
    methods = settings.get("proposal_methods") if isinstance(settings, Mapping) else None
    if isinstance(methods, list) and methods and isinstance(methods[0], Mapping):
        count = methods[0].get("speculative_tokens")
        if isinstance(count, int) and is_whole(count):
            return count
    raise CheckpointError(
        "speculators_config.proposal_methods names no speculative_tokens: how long are its drafts?"
    )
