"""The `config.json` of the speculators format, and the sizes in it.

Reads every field that decides what a drafter computes, refuses by name what Paceline's layers do not compute, and
writes such a file. Fields that only block drafters have are in `block_fields.py`. Called by `layout.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.methods.block_diffusion.layer import BlockPlan
from paceline.methods.checkpoint import CheckpointError, DrafterConfig
from paceline.methods.decoder_block import num_layers, rope_parameters
from paceline.methods.layouts.target_facts import TargetFacts
from paceline.methods.speculators.block_fields import read_block_fields, write_block_fields
from paceline.methods.speculators.fields import is_whole, mask_token, size_of, switch
from paceline.methods.speculators.layer_config import LAYERS, check_sizes, layer_config, rope_fields

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


def read_kind(content: Mapping[str, Any]) -> str:
    """The `speculators_model_type`.

    Raises:
        CheckpointError: a kind of drafter that is not supported.
    """
    kind = content.get("speculators_model_type")
    if kind not in KINDS:
        raise CheckpointError(f"speculators_model_type {kind!r} is none of {', '.join(KINDS)}")
    return str(kind)


def read_shape(content: Mapping[str, Any], target: TargetFacts) -> dict[str, Any]:
    """Sizes and switches, as in Paceline's `shape`.

    Args:
        content: the checkpoint's `config.json`.
        target: what it was made for.

    Raises:
        CheckpointError: naming the field that is missing, does not fit the target, or is not supported.
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


def write_config(config: DrafterConfig) -> dict[str, Any]:
    """A `config.json` that the package speculators and vLLM read.

    Args:
        config: Paceline's; the file names its `target_name`, if there is one, as the verifier.

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
    layer = LAYERS["qwen3" if head_norms else "llama"](
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


def _taps_field(kind: str) -> str:
    return "aux_hidden_state_layer_ids" if kind in BLOCK_KINDS else "eagle_aux_hidden_state_layer_ids"


def _tap_layers(content: Mapping[str, Any], kind: str, target: TargetFacts) -> list[int]:
    """Layers whose entering streams are read, in the format and in Paceline."""
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
    """Depths of training: a field of older files, else the tokens of the default proposal."""
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
