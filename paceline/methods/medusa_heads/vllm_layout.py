"""vLLM's layout of Medusa heads: `blocks.{head}.layers.{block}.*`, `lm_heads.{head}.weight`, and perhaps a `token_map`.

These are Paceline's own names too. Errors that vLLM ignores are refused here: biases without `medusa_fc_bias`, which
vLLM drops, and unknown names. With `original_lm_head` all heads share one output head; if the file has none, it is the
target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.methods.checkpoint import CheckpointError, DrafterConfig
from paceline.methods.layouts.layout import Layout
from paceline.methods.layouts.public_checkpoint import PublicCheckpoint
from paceline.methods.layouts.target_facts import TargetFacts
from paceline.methods.layouts.tensor_files import (
    check_finite,
    check_names,
    write_tensors,
)
from paceline.methods.medusa_heads.heads import MAX_HEADS, MedusaShape, OutputHead
from paceline.methods.medusa_heads.layout import SHARED, store_target_head

PREFIX = "medusa_heads."


def is_vllm(content: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of vLLM's Medusa heads."""
    return content.get("model_type") == "medusa" or content.get("architectures") == ["MedusaModel"]


def read_vllm(checkpoint: PublicCheckpoint, target: TargetFacts) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Read Medusa heads in vLLM's layout.

    Args:
        checkpoint: `config.json` and safetensors.
        target: the target they are for.

    Raises:
        CheckpointError: a field is out of range, or a tensor is missing, surplus or of another shape.
    """
    content = checkpoint.config.unchecked()
    found = {name.removeprefix(PREFIX): tensor for name, tensor in checkpoint.tensors().items()}
    is_shared = bool(content.get("original_lm_head", False))
    if is_shared and SHARED not in found and "lm_heads.0.weight" in found:
        found[SHARED] = found.pop("lm_heads.0.weight")
    output = OutputHead.OWN if not is_shared else OutputHead.SHARED if SHARED in found else OutputHead.TARGET
    shape = _shape(content, target, output)
    if shape.is_reduced and "token_map" in found:
        ids = shape.draft_ids(found["token_map"])
        found["token_map"] = ids
        for name, tensor in found.items():
            if name.startswith("lm_head") and tensor.shape[0] == target.vocab:
                found[name] = tensor[ids]  # vLLM cuts complete heads in the same way
    check_names(found, shape.tensor_shapes())
    check_finite(found)
    config = DrafterConfig(
        "medusa1",
        target.fingerprint,
        target.name,
        {**asdict(shape), "max_positions": target.max_positions},
        {"imported_from": "vllm"},
    )
    return config, found


def write_vllm(directory: Path, config: DrafterConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write Medusa heads in vLLM's layout.

    Raises:
        CheckpointError: the output head is the target's and not in the checkpoint, or a tensor is missing or surplus.
    """
    shape = MedusaShape.from_config(config)
    if shape.output is OutputHead.TARGET:
        raise CheckpointError(
            "the heads read the target's LM head: name the target with --target, to store it"
        )
    check_names(tensors, shape.tensor_shapes())
    content = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": shape.hidden,
        "vocab_size": shape.target_vocab,
        "truncated_vocab_size": shape.draft_vocab,
        "num_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "medusa_fc_bias": shape.has_bias,
        "original_lm_head": shape.output is OutputHead.SHARED,
    }
    write_tensors(directory, "model.safetensors", content, tensors)


def _shape(content: Mapping[str, Any], target: TargetFacts, output: OutputHead) -> MedusaShape:
    """Sizes from the fields, with vLLM's defaults for absent ones."""

    def number(name: str, default: int) -> int:
        value = content.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{name} must be a positive whole number, not {value!r}")
        return value

    if content.get("logit_scale", 1.0) != 1.0:
        raise CheckpointError(f"logit_scale {content['logit_scale']!r} is not supported: it must be 1")
    sizes = {"hidden_size": target.hidden, "vocab_size": target.vocab}
    for name, expected in sizes.items():
        if number(name, expected) != expected:
            raise CheckpointError(f"{name} is {content[name]}, the target's is {expected}")
    draft_vocab = number("truncated_vocab_size", target.vocab)
    if draft_vocab > target.vocab:
        raise CheckpointError(f"truncated_vocab_size is {draft_vocab}, above vocab_size")
    num_heads = number("num_heads", 5)
    if num_heads > MAX_HEADS:
        raise CheckpointError(f"num_heads must be at most {MAX_HEADS}, not {num_heads}")
    return MedusaShape(
        hidden=target.hidden,
        target_vocab=target.vocab,
        draft_vocab=draft_vocab,
        num_heads=num_heads,
        num_layers=number("num_hidden_layers", 1),
        has_bias=bool(content.get("medusa_fc_bias", False)),
        output=output,
    )


VLLM = Layout("vllm", is_vllm, read_vllm, write_vllm, store_target_head)
