"""EAGLE's own layout (SafeAILab): a flat `config.json` in Llama's words and one `model.safetensors`.

Covers EAGLE-1, whose layout EAGLE-2 shares, and EAGLE-3. No field of the configuration distinguishes them; the tensors
do. Nothing is unpickled.

An export loses what the layout does not have: the target's fingerprint, how the drafter was trained, the measured
accuracies that shape static trees, and which part of the vocabulary EAGLE-1 proposes (other programs let it propose
all).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.methods.checkpoint import CheckpointError, DrafterConfig
from paceline.methods.decoder_block import num_layers
from paceline.methods.eagle import feature_layer, fused_layer
from paceline.methods.layouts.embedding import store_embedding
from paceline.methods.layouts.layout import Layout
from paceline.methods.layouts.llama_config import block_shape, llama_config, positive
from paceline.methods.layouts.public_checkpoint import PublicCheckpoint
from paceline.methods.layouts.target_facts import TargetFacts
from paceline.methods.layouts.tensor_files import check_names, write_tensors
from paceline.methods.target_vocabulary import TOKEN_MAP
from paceline.training.sizes import default_tap_layers

EMBEDDING = "embed_tokens.weight"
AUXILIARY_LAYERS = "eagle_aux_hidden_state_layer_ids"

SHAPES: dict[str, Callable[[DrafterConfig], dict[str, tuple[int, ...]]]] = {
    "eagle1": feature_layer.parameter_shapes,
    "eagle2": feature_layer.parameter_shapes,
    "eagle3": fused_layer.parameter_shapes,
}


def is_eagle(content: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of this layout: one Llama layer, and no mark of another layout."""
    return (
        "speculators_model_type" not in content
        and content.get("model_type", "llama") == "llama"
        and "hidden_size" in content
        and content.get("num_hidden_layers", 1) == 1
    )


def read_eagle(checkpoint: PublicCheckpoint, target: TargetFacts) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Read a checkpoint of EAGLE-1 (method `eagle1`) or EAGLE-3 (`eagle3`).

    An embedding in the file is a frozen copy of the target's and is left out. If the configuration has no ids of
    auxiliary layers, EAGLE-3 reads layers 2, L // 2 and L - 3 of the target's L. Ids mean the layers that the streams
    enter, as in EAGLE's own code.

    Args:
        checkpoint: the public checkpoint.
        target: what the drafter was made for.

    Raises:
        CheckpointError: naming what is missing, surplus, of another shape or not supported.
    """
    source, tensors = checkpoint.config.unchecked(), checkpoint.tensors()
    if any(name.startswith("midlayer.") for name in tensors):
        method = "eagle3"
    elif any(name.startswith("layers.0.") for name in tensors):
        method = "eagle1"
    else:
        raise CheckpointError(
            f"{checkpoint.name!r}: neither layers.0.* (EAGLE-1) nor midlayer.* (EAGLE-3) is there"
        )
    shape = block_shape(source)
    if method == "eagle1":
        width = shape["hidden"]
        shape |= _eagle1_shape(source, tensors)
    else:
        shape |= _eagle3_shape(source, tensors, target)
        width = shape["target_hidden"]
    if (shape["target_vocab"], width) != (target.vocab, target.hidden):
        raise CheckpointError(
            f"made for a target of {shape['target_vocab']} tokens and width {width}, "
            f"not of {target.vocab} and {target.hidden}"
        )
    config = DrafterConfig(method, target.fingerprint, target.name, shape, {"imported_from": "eagle"})
    if EMBEDDING in tensors:
        found = tuple(tensors.pop(EMBEDDING).shape)
        if found != (target.vocab, width):
            raise CheckpointError(f"{EMBEDDING} has shape {found}, not {(target.vocab, width)}")
    if method == "eagle3" and shape["draft_vocab"] == target.vocab and not {"d2t", "t2d"} & set(tensors):
        # A whole vocabulary needs no map, and the layout has none.
        tensors["d2t"] = torch.zeros(target.vocab, dtype=torch.int64)
        tensors["t2d"] = torch.ones(target.vocab, dtype=torch.bool)
    check_names(tensors, SHAPES[method](config))
    return config, tensors


def write_eagle(directory: Path, config: DrafterConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint of `eagle1`, `eagle2` or `eagle3`.

    Raises:
        CheckpointError: another method, or tensors that do not fit the configuration, by name.
    """
    if config.method not in SHAPES:
        raise CheckpointError(f"EAGLE's layout holds {', '.join(SHAPES)}, not {config.method!r}")
    for flag in ("norm_before_residual", "norm_output", "head_norms"):
        if config.flag(flag):
            raise CheckpointError(f"shape.{flag}: EAGLE's layout cannot say so; the speculators format can")
    if num_layers(config) > 1:
        raise CheckpointError(
            f"shape.num_layers: EAGLE's layout has one layer, not {num_layers(config)}; the speculators format has more"
        )
    check_names(tensors, SHAPES[config.method](config))
    content = llama_config(config)
    content["torch_dtype"] = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    kept = {name: tensor for name, tensor in tensors.items() if name != TOKEN_MAP}
    if config.method == "eagle3":
        content |= {
            "draft_vocab_size": config.size("draft_vocab"),
            AUXILIARY_LAYERS: list(config.tap_layers()),
        }
        if config.size("target_hidden") != config.size("hidden"):
            content["target_hidden_size"] = config.size("target_hidden")
        if config.size("draft_vocab") == config.size("target_vocab") and not bool(kept["d2t"].any()):
            del kept["d2t"], kept["t2d"]
    else:
        content["bias"] = config.flag("fc_bias")
    write_tensors(directory, "model.safetensors", content, kept)


def _eagle1_shape(source: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    # The published loader expects a bias unless `bias` is false; files made by others have none and no such field.
    has_bias = source.get("bias", "fc.bias" in names)
    qkv_bias = source.get("qkv_bias", "layers.0.self_attn.q_proj.bias" in names)
    return {"fc_bias": bool(has_bias), "qkv_bias": bool(qkv_bias)}


def _eagle3_shape(source: Mapping[str, Any], names: Collection[str], target: TargetFacts) -> dict[str, Any]:
    layers = source.get(AUXILIARY_LAYERS)
    if layers is None:
        if not target.num_layers:
            raise CheckpointError(
                f"config.json: no {AUXILIARY_LAYERS}, and the target's layers are not known"
            )
        layers = default_tap_layers(target.num_layers)
    vocab = positive(source, "vocab_size")
    return {
        "target_hidden": positive(source, "target_hidden_size", positive(source, "hidden_size")),
        "draft_vocab": positive(source, "draft_vocab_size", vocab),
        "tap_layers": list(layers),
        "qkv_bias": "midlayer.self_attn.q_proj.bias" in names,
    }


EAGLE = Layout(
    "eagle",
    is_eagle,
    read_eagle,
    write_eagle,
    store_embedding,
    precedence=2,  # its only mark is a single layer of the Llama family
)
