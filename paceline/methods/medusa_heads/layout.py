"""FasterDecoding's Medusa layout: heads as one `ModuleList`, `{head}.{block}.linear.*` and `{head}.{last}.weight`.

Its `config.json` may name another number of heads than the weights have: the authors' own checkpoints say 2 and have 5.
Its loader skips unknown names. Here the heads are counted in the weights, and an unknown name is an error. A Medusa-2
model has heads and target in one directory, the heads under `medusa_head.`; only the heads are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.methods.checkpoint import CheckpointError, DrafterConfig
from paceline.methods.layouts.layout import Layout
from paceline.methods.layouts.public_checkpoint import PublicCheckpoint
from paceline.methods.layouts.target_facts import TargetFacts
from paceline.methods.layouts.tensor_files import check_finite, check_names, write_tensors
from paceline.methods.medusa_heads.heads import MedusaShape, OutputHead
from paceline.methods.medusa_heads.target_side import read_target_head

FILE_NAME = "medusa_lm_head.safetensors"
"""The reference's file has this name with the suffix `.pt`."""

MODEL_PREFIX = "medusa_head."
SHARED = "lm_head.weight"
"""An output head that all heads share."""

_NAME = re.compile(r"(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")


def is_medusa(content: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of this layout: it has a number of Medusa's heads, correct or not."""
    return "medusa_num_heads" in content


def read_medusa(checkpoint: PublicCheckpoint, target: TargetFacts) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Read heads in FasterDecoding's layout.

    Args:
        checkpoint: holds `medusa_lm_head.safetensors`, or a Medusa-2 model's safetensors.
        target: the target they are for; for a Medusa-2 model, the model itself.

    Raises:
        CheckpointError: a tensor is missing, surplus or of another shape, or the weights are pickled.
    """
    checkpoint.config.unchecked()
    found = checkpoint.tensors((FILE_NAME,))
    is_whole_model = any(name.startswith(MODEL_PREFIX) for name in found)
    if is_whole_model:
        found = {
            name.removeprefix(MODEL_PREFIX): tensor
            for name, tensor in found.items()
            if name.startswith(MODEL_PREFIX)
        }
    shape = _shape(found, target)
    names = _names(shape)
    check_names(found, {theirs: shape.parameter_shapes()[ours] for theirs, ours in names.items()})
    check_finite(found)
    config = DrafterConfig(
        "medusa2" if is_whole_model else "medusa1",
        target.fingerprint,
        target.name,
        {**asdict(shape), "max_positions": target.max_positions},
        {"imported_from": "medusa"},
    )
    return config, {ours: found[theirs] for theirs, ours in names.items()}


def write_medusa(directory: Path, config: DrafterConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write heads in FasterDecoding's layout, as safetensors.

    A shared output head is written once for each head, and absent biases are written as zeros.

    Raises:
        CheckpointError: the layout cannot express the heads: a reduced vocabulary, blocks that differ within a head
            (the reference repeats one), or output heads that are the target's and not in the checkpoint.
    """
    shape = MedusaShape.from_config(config)
    if shape.is_reduced:
        raise CheckpointError("the Medusa layout holds heads over the whole vocabulary alone: export to vllm")
    if shape.output is OutputHead.TARGET:
        raise CheckpointError(
            "the heads read the target's LM head: name the target with --target, to store it"
        )
    check_names(tensors, shape.tensor_shapes())
    for k in range(shape.num_heads):
        for j in range(1, shape.num_layers):
            for part in ("weight", "bias") if shape.has_bias else ("weight",):
                first, later = (tensors[f"blocks.{k}.layers.{i}.{part}"] for i in (0, j))
                if not torch.equal(first, later):
                    raise CheckpointError(
                        f"blocks.{k}.layers.{j} is not blocks.{k}.layers.0: the Medusa layout repeats one block"
                    )
    written: dict[str, Tensor] = {}
    for k in range(shape.num_heads):
        for j in range(shape.num_layers):
            weight = tensors[f"blocks.{k}.layers.{j}.weight"]
            written[f"{k}.{j}.linear.weight"] = weight
            bias = (
                tensors[f"blocks.{k}.layers.{j}.bias"] if shape.has_bias else weight.new_zeros(shape.hidden)
            )
            written[f"{k}.{j}.linear.bias"] = bias
        name = "lm_head.weight" if shape.output is OutputHead.SHARED else f"lm_heads.{k}.weight"
        written[f"{k}.{shape.num_layers}.weight"] = tensors[name]
    content = {
        "base_model_name_or_path": config.target_name,
        "medusa_num_heads": shape.num_heads,
        "medusa_num_layers": shape.num_layers,
        "model_type": "llama",
    }
    write_tensors(directory, FILE_NAME, content, written)


def _shape(found: Mapping[str, Tensor], target: TargetFacts) -> MedusaShape:
    """Sizes, counted from the tensors' names."""
    heads: set[int] = set()
    last = 0
    for name in found:
        match = _NAME.fullmatch(name)
        if match is None:
            raise CheckpointError(f"{name} is surplus: it is no tensor of a Medusa head")
        heads.add(int(match[1]))
        if match[3] == "weight":
            last = max(last, int(match[2]))
    if not heads or last < 1:
        raise CheckpointError("there are no Medusa heads, or they have no residual block")
    return MedusaShape(
        hidden=target.hidden,
        target_vocab=target.vocab,
        draft_vocab=target.vocab,
        num_heads=max(heads) + 1,
        num_layers=last,
        has_bias=any(name.endswith(".linear.bias") for name in found),
    )


def _names(shape: MedusaShape) -> dict[str, str]:
    """Paceline's name for each of the layout's."""
    names: dict[str, str] = {}
    for k in range(shape.num_heads):
        for j in range(shape.num_layers):
            names[f"{k}.{j}.linear.weight"] = f"blocks.{k}.layers.{j}.weight"
            if shape.has_bias:
                names[f"{k}.{j}.linear.bias"] = f"blocks.{k}.layers.{j}.bias"
        names[f"{k}.{shape.num_layers}.weight"] = f"lm_heads.{k}.weight"
    return names


def store_target_head(
    config: DrafterConfig, tensors: Mapping[str, Tensor], target_dir: Path
) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Add the target's LM head to heads that read it, for programs that load it from the checkpoint.

    Args:
        config: of the heads; heads with an output head of their own are returned unchanged.
        tensors: of the heads.
        target_dir: the target.

    Raises:
        CheckpointError: the target's head is of another shape.
    """
    shape = MedusaShape.from_config(config)
    if shape.output is not OutputHead.TARGET:
        return config, dict(tensors)
    head = read_target_head(target_dir, shape, torch.bfloat16)
    ids = shape.draft_ids(tensors["token_map"]) if shape.is_reduced else slice(None)
    stored = replace(config, shape={**config.shape, "output": OutputHead.SHARED})
    return stored, {**tensors, SHARED: head[ids].contiguous()}


MEDUSA = Layout("medusa", is_medusa, read_medusa, write_medusa, store_target_head)
