"""The speculators format (vllm-project/speculators 0.9.0): EAGLE-3 and P-EAGLE drafters, as vLLM serves them.

Responsible for the names of its tensors, both ways. The layer ids of the format name streams that *enter* a layer, as
Paceline's `tap_layers` do. Called through `formats.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoints.speculators_config import KINDS, read_kind, read_shape, write_config
from paceline.checkpoints.target_facts import TargetFacts
from paceline.checkpoints.tensor_files import (
    check_finite,
    check_names,
    read_public_config,
    read_tensors,
    write_tensors,
)
from paceline.drafters.checkpoint import CheckpointError, DrafterConfig
from paceline.drafters.eagle3_layer import parameter_shapes, read_draft_ids
from paceline.drafters.p_eagle import p_eagle_shapes

_EMBEDDING = "embed_tokens.weight"
_FUSED, _PUBLIC_FUSED = "midlayer.", "layers.0."


def is_speculators(content: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of this format."""
    return "speculators_model_type" in content


def read_speculators(directory: Path, target: TargetFacts) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Read a checkpoint of the format.

    An embedding that is the target's own is left out where the method reads the target's; a vocabulary that is not
    reduced gets the identity as its map.

    Raises:
        CheckpointError: naming a field or tensor that is missing, surplus, of another size, or asks for what the
            drafters do not compute.
    """
    content = read_public_config(directory)
    kind = read_kind(content)
    shape = read_shape(content, target)
    made = {
        "imported_from": "speculators",
        "speculators_version": str(content.get("speculators_version", "")),
    }
    config = DrafterConfig(
        KINDS[kind], target.fingerprint, target.name, {**shape, "has_embedding": True}, made
    )
    required = {_public(name): size for name, size in _shapes(config).items()}
    names = [_EMBEDDING]  # that may be absent
    if shape["draft_vocab"] == shape["target_vocab"]:
        names += ["d2t", "t2d"]
    found = read_tensors(directory)
    check_names(found, {name: size for name, size in required.items() if name in found or name not in names})
    check_finite(found)
    tensors = {_own(name): tensor for name, tensor in found.items()}
    _check_vocabulary(config, tensors)
    embedding = tensors.get(_EMBEDDING)
    own = embedding is not None and not torch.equal(embedding, target.embedding(embedding.dtype))
    if kind == "peagle":
        if embedding is None:
            tensors[_EMBEDDING] = target.embedding(tensors["lm_head.weight"].dtype)
        return _with_embedding(config, None), tensors
    if not own:
        tensors.pop(_EMBEDDING, None)
    return _with_embedding(config, own), tensors


def write_speculators(directory: Path, config: DrafterConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint of the format.

    Raises:
        CheckpointError: naming what the format cannot express, or a tensor that does not fit the configuration.
    """
    content = write_config(config)
    check_names(tensors, _shapes(config))
    out = {_public(name): tensor for name, tensor in tensors.items()}
    ids = read_draft_ids(config, tensors["d2t"], torch.device("cpu"))
    if config.size("draft_vocab") == config.size("target_vocab"):
        del out["d2t"], out["t2d"]  # the format has none for a vocabulary that is not reduced
        if ids is not None:
            out["lm_head.weight"] = out["lm_head.weight"][ids.argsort()]
    write_tensors(directory, "model.safetensors", content, out)


def _shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    return p_eagle_shapes(config) if config.method == "p_eagle" else parameter_shapes(config)


def _public(name: str) -> str:
    return _PUBLIC_FUSED + name[len(_FUSED) :] if name.startswith(_FUSED) else name


def _own(name: str) -> str:
    return _FUSED + name[len(_PUBLIC_FUSED) :] if name.startswith(_PUBLIC_FUSED) else name


def _with_embedding(config: DrafterConfig, own: bool | None) -> DrafterConfig:
    """The configuration that says whether an embedding is among the tensors; nothing where the method always has."""
    shape = {name: value for name, value in config.shape.items() if name != "has_embedding"}
    if own:
        shape["has_embedding"] = True
    return DrafterConfig(config.method, config.target_fingerprint, config.target_name, shape, config.training)


def _check_vocabulary(config: DrafterConfig, tensors: dict[str, Tensor]) -> None:
    """Complete and check the maps between draft ids and the target's."""
    vocab = config.size("target_vocab")
    if "d2t" not in tensors:
        tensors["d2t"] = torch.zeros(config.size("draft_vocab"), dtype=torch.int64)
        tensors["t2d"] = torch.ones(vocab, dtype=torch.bool)
    if tensors["d2t"].is_floating_point() or tensors["t2d"].is_floating_point():
        raise CheckpointError("d2t and t2d must hold whole numbers")
    tensors["d2t"] = tensors["d2t"].to(torch.int64)
    tensors["t2d"] = tensors["t2d"].to(torch.bool)
    ids = read_draft_ids(config, tensors["d2t"], torch.device("cpu"))
    marked = torch.zeros(vocab, dtype=torch.bool)
    marked[torch.arange(vocab) if ids is None else ids] = True
    if not torch.equal(marked, tensors["t2d"]):
        raise CheckpointError(
            "t2d does not mark the tokens that d2t names: were the maps loaded before it was saved?"
        )
