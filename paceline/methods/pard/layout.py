"""AMD's layout of PARD and PARD-2: a transformers directory whose `config.json` names `pard_token` (AMD-AGI/PARD).

A PARD checkpoint can be served as it is, for all targets with its tokenizer; importing it binds it to one target.
PARD-2 adds `target_proj` in a file of its own (a pickle, `warp_model.bin`, to be converted to
`warp_model.safetensors`). It names the states it reads as indices into transformers' `hidden_states`: -1 is the state
after the final norm, which Paceline puts last.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.methods.checkpoint import CheckpointError, DrafterConfig, load_tensor
from paceline.methods.layouts.layout import Layout
from paceline.methods.layouts.public_checkpoint import PublicCheckpoint
from paceline.methods.layouts.target_facts import TargetFacts
from paceline.methods.layouts.tensor_files import (
    check_finite,
    read_tensors,
    write_tensors,
)
from paceline.methods.pard.checkpoint import (
    BESIDE,
    MODEL_CONFIG,
    PROJECTION,
    PROJECTION_BIAS,
    mask_token,
    read_model_config,
    read_vocabulary,
    save_pard,
)
from paceline.methods.whole_model.draft_model import model_directory
from paceline.models import copy_tokenizer
from paceline.safetensors_io import write_weights

WARP = "warp_model.safetensors"
DEFAULT_SCALE = 0.02
DEFAULT_LAYERS = [-1, -8, -16, -24]

OLDER_NAMES = {
    "pard2_scale": ("feat_scale", "pard_scale"),
    "pard2_target_dim": ("pard_target_dim",),
    "pard2_target_layers": ("target_layers",),
}
"""Spellings that the authors' loader accepts too."""


def is_pard(content: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of a drafter with mask tokens."""
    return "pard_token" in content


def read_pard(checkpoint: PublicCheckpoint, target: TargetFacts) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Read a drafter in AMD's layout.

    Args:
        checkpoint: `config.json`, safetensors and, for PARD-2, `warp_model.safetensors`.
        target: the target it is for.

    Raises:
        CheckpointError: a field is out of range, a tensor is missing, surplus or of another shape, or the tokenizer is
            not the target's.
    """
    directory, content, tensors = checkpoint.directory, checkpoint.config.unchecked(), checkpoint.tensors()
    vocab = content.get("vocab_size")
    if not isinstance(vocab, int) or vocab < 1:
        raise CheckpointError(f"vocab_size must be a positive whole number, not {vocab!r}")
    shape: dict[str, Any] = {"mask_token": content.get("pard_token"), MODEL_CONFIG: content}
    config = DrafterConfig("pard1", target.fingerprint, target.name, shape, {"imported_from": "pard"})
    mask_token(config, vocab)
    if target.directory is None:
        raise CheckpointError(f"the tokenizer of target {target.name!r} is needed, and is not here")
    read_vocabulary(directory, config, target.directory, vocab)
    if not content.get("pard2"):
        check_finite(tensors)
        return config, tensors
    bias = content.get("pard2_proj_bias", False)
    if not isinstance(bias, bool):
        raise CheckpointError(f"pard2_proj_bias must be true or false, not {bias!r}")
    if not (directory / WARP).is_file():
        raise CheckpointError(
            f"{directory.name!r} has no {WARP}, which holds {PROJECTION}. A warp_model.bin is a pickle, which "
            "is never read here: convert it where you trust it, by "
            'safetensors.torch.save_file(torch.load("warp_model.bin", weights_only=True), '
            f'"{WARP}"). Without it the directory serves as it is, without features'
        )
    warp = checkpoint.tensors([WARP])
    expected = {PROJECTION, PROJECTION_BIAS} if bias else {PROJECTION}
    problems = [f"{name} is missing" for name in sorted(expected - set(warp))]
    problems += [f"{name} is surplus" for name in sorted(set(warp) - expected)]
    if problems:
        raise CheckpointError(f"{WARP}: " + "; ".join(problems))
    layers, norm_final, order = _taps(content, target)
    hidden = content.get("hidden_size")
    size = (hidden, len(order) * target.hidden)
    given = _field(content, "pard2_target_dim", size[1])
    if given != size[1]:
        raise CheckpointError(
            f"pard2_target_dim is {given}, and {len(order)} states of the target are {size[1]}"
        )
    if tuple(warp[PROJECTION].shape) != size:
        raise CheckpointError(f"{PROJECTION} has shape {tuple(warp[PROJECTION].shape)}, not {size}")
    blocks = warp[PROJECTION].split(target.hidden, dim=1)
    tensors[PROJECTION] = torch.cat([blocks[place] for place in order], dim=1)
    if bias:
        tensors[PROJECTION_BIAS] = warp[PROJECTION_BIAS]
    check_finite(tensors)
    scale = _field(content, "pard2_scale", DEFAULT_SCALE)
    shape |= {
        "tap_layers": layers,
        "norm_final": norm_final,
        "target_hidden": target.hidden,
        "scale": scale,
        "proj_bias": bias,
    }
    return DrafterConfig("pard2", target.fingerprint, target.name, shape, config.training), tensors


def write_pard(directory: Path, config: DrafterConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write a drafter in AMD's layout, with the complete head: the layout cannot say which rows are drafted.

    Raises:
        CheckpointError: a tensor is missing.
    """
    content = dict(config.shape[MODEL_CONFIG])
    content["pard_token"] = mask_token(config, int(content["vocab_size"]))
    content["spd_type"] = "pard"
    weights = {name: tensor for name, tensor in tensors.items() if name not in BESIDE}
    if config.method == "pard2":
        warp = {name: tensors[name] for name in (PROJECTION, PROJECTION_BIAS) if name in tensors}
        if PROJECTION not in warp:
            raise CheckpointError(f"{PROJECTION} is missing")
        layers, hidden = config.shape["tap_layers"], config.size("target_hidden")
        blocks = list(warp[PROJECTION].split(hidden, dim=1))
        if config.flag("norm_final"):
            blocks = [blocks[-1], *blocks[:-1]]
            layers = [-1, *layers]
        content |= {
            "pard2": True,
            "spd_type": "pard2",
            "pard2_scale": config.shape["scale"],
            "pard2_proj_bias": config.flag("proj_bias"),
            "pard2_target_dim": len(blocks) * hidden,
            "pard2_target_layers": layers,
        }
        write_weights(directory / WARP, warp | {PROJECTION: torch.cat(blocks, dim=1)})
    write_tensors(directory, "model.safetensors", content, weights)


def load_own(directory: Path, config: DrafterConfig) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Paceline's own checkpoint in the form that `read_pard` returns: the model, its configuration, further tensors.

    Raises:
        CheckpointError: a part is missing.
    """
    model = model_directory(directory)
    tensors = read_tensors(model)
    if config.method == "pard2":
        tensors[PROJECTION] = load_tensor(directory, PROJECTION)
        if config.flag("proj_bias"):
            tensors[PROJECTION_BIAS] = load_tensor(directory, PROJECTION_BIAS)
    shape = {**config.shape, MODEL_CONFIG: read_model_config(model)}
    own = DrafterConfig(config.method, config.target_fingerprint, config.target_name, shape, config.training)
    return own, tensors


def carry_tokenizer(source: Path, output: Path) -> None:
    """Copy a checkpoint's tokenizer to the model that was written from it, in either direction."""
    copy_tokenizer(model_directory(source), model_directory(output))


def _field(content: Mapping[str, Any], name: str, default: Any) -> Any:
    """A field by its name, or one of its older ones."""
    for spelling in (name, *OLDER_NAMES.get(name, ())):
        if spelling in content:
            return content[spelling]
    return default


def _taps(content: Mapping[str, Any], target: TargetFacts) -> tuple[list[int], bool, list[int]]:
    """Layers whose entering streams are read, whether the final norm's output is read, and each block's public place.

    Index `i` of `hidden_states` is the stream entering layer `i`; the last entry is the final norm's output.
    """
    given = _field(content, "pard2_target_layers", DEFAULT_LAYERS)
    count = target.num_layers + 1
    if (
        not isinstance(given, list)
        or not given
        or not all(isinstance(i, int) and not isinstance(i, bool) and -count <= i < count for i in given)
    ):
        raise CheckpointError(
            f"pard2_target_layers {given!r} are not all indices of {count} hidden states, as target {target.name!r} has"
        )
    indices = [i % count for i in given]
    last = target.num_layers
    if len(set(indices)) != len(indices):
        raise CheckpointError(f"pard2_target_layers {given} name a state twice")
    streams = [place for place, index in enumerate(indices) if index != last]
    norm = [place for place, index in enumerate(indices) if index == last]
    return [indices[place] for place in streams], bool(norm), [*streams, *norm]


PARD = Layout(
    "pard",
    is_pard,
    read_pard,
    write_pard,
    load=load_own,
    save=save_pard,
    carry=carry_tokenizer,
    precedence=1,  # P-EAGLE's configurations may name a mask token under the same key
)
