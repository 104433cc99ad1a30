"""The `config.json` of the speculators format, and the sizes in it.

Reads every field that decides what a drafter computes, refuses by name what Paceline's layers do not compute, and
writes such a file. Each method's kind (`kind.py`) reads and writes the fields that only its drafters have. Called by
`layout.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.methods.checkpoint import CheckpointError, DrafterConfig
from paceline.methods.decoder_block import num_layers, rope_parameters
from paceline.methods.layouts.target_facts import TargetFacts
from paceline.methods.speculators.fields import is_whole, size_of
from paceline.methods.speculators.kind import TapKind, kind_of, tap_kinds
from paceline.methods.speculators.layer_config import LAYERS, check_sizes, layer_config, rope_fields

VERSION = "0.9.0"
"""Of the package whose layout is written."""


def read_kind(content: Mapping[str, Any]) -> TapKind:
    """The kind that `speculators_model_type` names.

    Raises:
        CheckpointError: a kind of drafter that is not supported.
    """
    name, kinds = content.get("speculators_model_type"), tap_kinds()
    if name not in kinds:
        raise CheckpointError(f"speculators_model_type {name!r} is none of {', '.join(kinds)}")
    return kinds[name]


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
        "head_norms": kind.is_block or layer.model_type == "qwen3",
        **rope_fields(layer),
    }
    return shape | kind.read_fields(content, vocab)


def write_config(config: DrafterConfig) -> dict[str, Any]:
    """A `config.json` that the package speculators and vLLM read.

    Args:
        config: Paceline's; the file names its `target_name`, if there is one, as the verifier.

    Raises:
        CheckpointError: naming what the format cannot express.
    """
    kind, shape = kind_of(config.method), config.shape
    if not isinstance(kind, TapKind):
        raise CheckpointError(f"method {config.method!r} has no place in the speculators format")
    if config.size("target_hidden") != config.size("hidden"):
        raise CheckpointError(
            "shape.hidden differs from shape.target_hidden, which the speculators format cannot say"
        )
    if config.flag("qkv_bias"):
        raise CheckpointError("shape.qkv_bias: the speculators format has biases on all of attention or none")
    head_norms = config.flag("head_norms")
    if kind.is_block and not head_norms:
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
    return {
        "architectures": [kind.architecture],
        "speculators_model_type": kind.name,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind.name,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": kind.num_drafts(config),
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
        **kind.write_fields(config),
    }


def _taps_field(kind: TapKind) -> str:
    return "aux_hidden_state_layer_ids" if kind.is_block else "eagle_aux_hidden_state_layer_ids"


def _tap_layers(content: Mapping[str, Any], kind: TapKind, target: TargetFacts) -> list[int]:
    """Layers whose entering streams are read, in the format and in Paceline."""
    field = _taps_field(kind)
    layers = content.get(field)
    if layers is None and not kind.is_block:
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
