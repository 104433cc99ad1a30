"""Multi-token prediction in the speculators format (`speculators_model_type` `mtp`, FastMTP's single module).

Maps its sizes and names, both ways. The format has one module. Its block has norms of queries and keys, as Qwen3's; it
joins the embedding first and passes on the output of its last norm. Embedding and head are the target's and are not
stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import Qwen3Config

from paceline.methods.checkpoint import CheckpointError, DrafterConfig
from paceline.methods.decoder_block import rope_parameters
from paceline.methods.deepseek_mtp.layer import module_prefix, num_modules, parameter_shapes
from paceline.methods.layouts.target_facts import TargetFacts
from paceline.methods.layouts.tensor_files import (
    check_finite,
    check_names,
    read_tensors,
    write_tensors,
)
from paceline.methods.speculators.config import VERSION
from paceline.methods.speculators.fields import is_whole, size_of
from paceline.methods.speculators.kind import OwnKind
from paceline.methods.speculators.layer_config import check_sizes, layer_config, rope_fields

_NAME = "mtp"
_PUBLIC = "mtp_layers.0."
_NAMES = {
    "enorm.weight": "token_layernorm.weight",
    "hnorm.weight": "hidden_layernorm.weight",
    "eh_proj.weight": "input_proj.weight",
    "shared_head.norm.weight": "final_layernorm.weight",
}
_SHARED = ("embed_tokens.weight", "lm_head.weight")
"""The target's; the package leaves them out, and they are left out here where they are stored."""


def read_mtp(
    directory: Path, content: Mapping[str, Any], target: TargetFacts
) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Read a checkpoint.

    Args:
        directory: the checkpoint.
        content: its `config.json`.
        target: what it was made for.

    Raises:
        CheckpointError: naming a field or tensor that is missing, surplus, of another size, or not
            supported.
    """
    layer = layer_config(content)
    if layer.model_type != "qwen3":
        raise CheckpointError(
            f"transformer_layer_config.model_type {layer.model_type!r}: the module is computed for qwen3 alone"
        )
    count = content.get("num_nextn_predict_layers", 1)
    if not is_whole(count) or count != 1:
        raise CheckpointError(f"num_nextn_predict_layers must be 1, not {count!r}")
    heads, kv_heads = check_sizes(layer, target)
    hidden = size_of(layer, "hidden_size")
    shape: dict[str, Any] = {
        "hidden": hidden,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": size_of(layer, "head_dim") if getattr(layer, "head_dim", None) else hidden // heads,
        "intermediate": size_of(layer, "intermediate_size"),
        "target_vocab": target.vocab,
        "target_layers": target.num_layers,
        "rms_eps": float(layer.rms_norm_eps),
        "max_positions": size_of(layer, "max_position_embeddings"),
        "num_modules": 1,
        "carries_norm": True,
        "head_norms": True,
        **rope_fields(layer),
    }
    made = {
        "imported_from": "speculators",
        "speculators_version": str(content.get("speculators_version", "")),
    }
    config = DrafterConfig("deepseek_mtp", target.fingerprint, target.name, shape, made)
    found = read_tensors(directory)
    shared = {name: (target.vocab, hidden) for name in _SHARED if name in found}
    check_names(found, {_public(name): size for name, size in parameter_shapes(config).items()} | shared)
    check_finite({name: tensor for name, tensor in found.items() if name not in _SHARED})
    return config, {name: found[_public(name)] for name in parameter_shapes(config)}


def write_mtp(directory: Path, config: DrafterConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint.

    Raises:
        CheckpointError: naming what the format cannot express, or a tensor that does not fit the configuration.
    """
    if num_modules(config) != 1:
        raise CheckpointError("shape.num_modules: the speculators format has one module")
    for name, wanted, means in (
        ("carries_norm", True, "hands on what the last norm gives"),
        ("head_norms", True, "has norms of queries and keys"),
        ("qkv_bias", False, "has no biases"),
        ("reads_residual", False, "reads the target behind its final norm"),
    ):
        if config.flag(name) is not wanted:
            raise CheckpointError(f"shape.{name}: a module of the speculators format {means}")
    for name in ("latent", "experts"):
        if config.shape.get(name) is not None:
            raise CheckpointError(f"shape.{name}: a module of the speculators format has an ordinary block")
    check_names(tensors, parameter_shapes(config))
    layer = Qwen3Config(
        hidden_size=config.size("hidden"),
        intermediate_size=config.size("intermediate"),
        num_hidden_layers=config.size("target_layers"),
        num_attention_heads=config.size("num_heads"),
        num_key_value_heads=config.size("num_kv_heads"),
        head_dim=config.size("head_dim"),
        vocab_size=config.size("target_vocab"),
        max_position_embeddings=config.size("max_positions"),
        rms_norm_eps=float(config.shape.get("rms_eps", 1e-5)),
        rope_parameters=rope_parameters(config),
        hidden_act="silu",
        tie_word_embeddings=False,
    )
    written = layer.to_dict()
    for name in ("transformers_version", "architectures", "_name_or_path", "dtype"):
        written.pop(name, None)
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": 3,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    content = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": _NAME,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": _NAME,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": config.target_name or None, "architectures": []},
        },
        "transformer_layer_config": written,
        "num_nextn_predict_layers": 1,
    }
    write_tensors(directory, "model.safetensors", content, {_public(name): t for name, t in tensors.items()})


def _public(name: str) -> str:
    rest = name.removeprefix(module_prefix(0))
    return _PUBLIC + _NAMES.get(rest, rest)


KIND = OwnKind(_NAME, "deepseek_mtp", read_mtp, write_mtp)
