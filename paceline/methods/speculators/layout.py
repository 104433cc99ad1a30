"""The speculators format (vllm-project/speculators 0.9.0): drafters as vLLM serves them.

Maps the names of tensors, both ways, for every kind of drafter that a method declares (`kind.py`). Layer ids of the
format name streams that *enter* a layer, as Paceline's `tap_layers` do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.methods.checkpoint import CheckpointError, DrafterConfig
from paceline.methods.layouts.embedding import store_embedding
from paceline.methods.layouts.layout import Layout
from paceline.methods.layouts.public_checkpoint import PublicCheckpoint
from paceline.methods.layouts.target_facts import TargetFacts
from paceline.methods.layouts.tensor_files import (
    check_finite,
    check_names,
    read_tensors,
    write_tensors,
)
from paceline.methods.registry import METHODS
from paceline.methods.speculators.config import read_kind, read_shape, write_config
from paceline.methods.speculators.kind import OwnKind, TapKind, kind_of, own_kinds
from paceline.methods.target_vocabulary import read_draft_ids

_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_FUSED, _PUBLIC_FUSED = "midlayer.", "layers.0."


def is_speculators(content: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of this format."""
    return "speculators_model_type" in content


def read_speculators(
    checkpoint: PublicCheckpoint, target: TargetFacts
) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Read a checkpoint of the format.

    An embedding or head equal to the target's is left out if the method reads the target's. A vocabulary that is not
    reduced gets the identity as its map.

    Raises:
        CheckpointError: naming a field or tensor that is missing, surplus, of another size, or not
            supported.
    """
    content = checkpoint.config.unchecked()
    own = own_kinds().get(str(content.get("speculators_model_type")))
    if own is not None:
        return own.read(checkpoint.directory, content, target)
    made = {
        "imported_from": "speculators",
        "speculators_version": str(content.get("speculators_version", "")),
    }
    return read_content(checkpoint.directory, content, target, made)


def read_content(
    directory: Path,
    content: Mapping[str, Any],
    target: TargetFacts,
    made: dict[str, Any],
    tensors_found: Mapping[str, Tensor] | None = None,
    shape_too: Mapping[str, Any] | None = None,
) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Read the tensors of a directory by a configuration in the format's words; other layouts translate theirs.

    Args:
        directory: with safetensors.
        content: in the format's words.
        target: what the drafter was made for.
        made: the checkpoint's record of its origin.
        tensors_found: tensors under the format's names, if they have been read.
        shape_too: further fields of `shape`.

    Raises:
        CheckpointError: as of :func:`read_speculators`.
    """
    kind = read_kind(content)
    shape = {**read_shape(content, target), **(shape_too or {})}
    whole = {"has_embedding": True, "has_head": True} if kind.is_block else {"has_embedding": True}
    config = DrafterConfig(kind.method, target.fingerprint, target.name, {**shape, **whole}, made)
    required = {_public(name): size for name, size in _shapes(config).items()}
    names = [_EMBEDDING]  # may be absent
    if shape["draft_vocab"] == shape["target_vocab"]:
        names += ["d2t", "t2d"]
        names += [_HEAD] if kind.is_block else []
    found = read_tensors(directory) if tensors_found is None else dict(tensors_found)
    check_names(found, {name: size for name, size in required.items() if name in found or name not in names})
    check_finite(found)
    tensors = found if kind.is_block else {_own(name): tensor for name, tensor in found.items()}
    _check_vocabulary(config, tensors)
    embedding = tensors.get(_EMBEDDING)
    own = embedding is not None and not torch.equal(embedding, target.embedding(embedding.dtype))
    if kind.keeps_embedding:
        if embedding is None:
            tensors[_EMBEDDING] = target.embedding(tensors["lm_head.weight"].dtype)
        return _with_own(config), tensors
    if not own:
        tensors.pop(_EMBEDDING, None)
    flags = {"has_embedding": own}
    if kind.is_block:
        flags["has_head"] = _keeps_head(config, tensors, target)
    return _with_own(config, **flags), tensors


def _keeps_head(config: DrafterConfig, tensors: dict[str, Tensor], target: TargetFacts) -> bool:
    """Whether the drafter has a head of its own; a copy of the target's is removed."""
    head = tensors.get(_HEAD)
    if head is None:
        return False
    ids = read_draft_ids(config, tensors["d2t"], torch.device("cpu"))
    theirs = target.head(head.dtype)
    if torch.equal(head, theirs if ids is None else theirs[ids]):
        del tensors[_HEAD]
    return _HEAD in tensors


def write_speculators(directory: Path, config: DrafterConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint of the format.

    Raises:
        CheckpointError: naming what the format cannot express, or a tensor that does not fit the configuration.
    """
    kind = kind_of(config.method)
    if isinstance(kind, OwnKind):
        kind.write(directory, config, tensors)
        return
    content, out = write_config(config), public_tensors(config, tensors)
    if config.size("draft_vocab") != config.size("target_vocab") and _HEAD not in out:
        raise CheckpointError(
            f"{_HEAD}: the format stores the head of a reduced vocabulary, and this drafter reads its target's: name "
            "the target"
        )
    write_tensors(directory, "model.safetensors", content, out)


def public_tensors(config: DrafterConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the format's names. A vocabulary that is not reduced has the target's order and no maps.

    Raises:
        CheckpointError: a tensor does not fit the configuration.
    """
    check_names(tensors, _shapes(config))
    out = {_public(name): tensor for name, tensor in tensors.items()}
    ids = read_draft_ids(config, tensors["d2t"], torch.device("cpu"))
    if config.size("draft_vocab") == config.size("target_vocab"):
        del out["d2t"], out["t2d"]  # the format has none for a vocabulary that is not reduced
        if ids is not None:
            of_drafts = METHODS[config.method].draft_rows
            out |= {name: out[name][ids.argsort()] for name in out if name.startswith(of_drafts)}
    return out


def store_target(
    config: DrafterConfig, tensors: Mapping[str, Tensor], target_dir: Path
) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Add what the drafter shares with its target, as far as the format stores it.

    A kind with files of its own gets nothing. A block drafter with a reduced vocabulary gets rows of the target's head;
    its loaders take the embedding, and a head that is not reduced, from the target. Others get the embedding.
    """
    kind = kind_of(config.method)
    if isinstance(kind, OwnKind):
        return config, dict(tensors)
    if kind is None or not kind.is_block:
        return store_embedding(config, tensors, target_dir)
    if _HEAD in tensors or config.size("draft_vocab") == config.size("target_vocab"):
        return config, dict(tensors)
    ids = read_draft_ids(config, tensors["d2t"], torch.device("cpu"))
    head = TargetFacts.read(target_dir).head(tensors["fc.weight"].dtype)
    stored = replace(config, shape={**config.shape, "has_head": True})
    return stored, {**tensors, _HEAD: head if ids is None else head[ids]}


def _shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    kind = kind_of(config.method)
    if not isinstance(kind, TapKind):
        raise CheckpointError(f"method {config.method!r} has no tensors in the speculators format")
    return kind.shapes(config)


def _public(name: str) -> str:
    return _PUBLIC_FUSED + name[len(_FUSED) :] if name.startswith(_FUSED) else name


def _own(name: str) -> str:
    return _FUSED + name[len(_PUBLIC_FUSED) :] if name.startswith(_PUBLIC_FUSED) else name


def _with_own(config: DrafterConfig, **flags: bool) -> DrafterConfig:
    """The configuration with a flag for each shared tensor that the drafter has its own of."""
    shape = {name: value for name, value in config.shape.items() if name not in ("has_embedding", "has_head")}
    return replace(config, shape=shape | {name: True for name, own in flags.items() if own})


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


SPECULATORS = Layout("speculators", is_speculators, read_speculators, write_speculators, store_target)
