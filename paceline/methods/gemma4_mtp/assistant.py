"""Gemma 4's assistant models as transformers saves them (`model_type` `gemma4_assistant`), read and written.

Sizes come from `config.json`, and every tensor is checked by name and shape. Which of the target's layers are read
follows from the target's own configuration: the last layer of each type that computes its own keys and values. A head
that is stored beside the embedding it is tied to is left out. An export loses the target's fingerprint and how the
model was trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoConfig

from paceline.methods.checkpoint import CheckpointError, DrafterConfig
from paceline.methods.gemma4_mtp.assistant_config import read_shape_of
from paceline.methods.gemma4_mtp.layer import check_order, read_cached_layers, read_shape
from paceline.methods.gemma4_mtp.model import FULL, SLIDING, Gemma4MtpShape
from paceline.methods.layouts.layout import Layout
from paceline.methods.layouts.public_checkpoint import PublicCheckpoint
from paceline.methods.layouts.target_facts import TargetFacts
from paceline.methods.layouts.tensor_files import check_names, write_tensors
from paceline.model.layer_heads import last_own_layers, layer_heads

_MODEL_TYPE = "gemma4_assistant"
_HEAD = "lm_head.weight"


def is_gemma4_assistant(content: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of this layout."""
    return content.get("model_type") == _MODEL_TYPE


def read_gemma4_assistant(
    checkpoint: PublicCheckpoint, target: TargetFacts
) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Read a checkpoint for a target, whose configuration is read too.

    Raises:
        CheckpointError: naming what is missing, surplus, of another shape or not supported, or what the target lacks.
    """
    shape, tensors = read_model(checkpoint)
    if (shape.backbone, shape.vocab) != (target.hidden, target.vocab):
        raise CheckpointError(
            f"made for a target of {shape.vocab} tokens and width {shape.backbone}, "
            f"not of {target.vocab} and {target.hidden}"
        )
    layers, heads = _target_layers(target, set(shape.layer_types))
    for kind, (_, head_dim) in heads.items():
        if head_dim != shape.head_dims[kind]:
            raise CheckpointError(
                f"{kind}: heads are {shape.head_dims[kind]} wide, in layer {layers[kind]} of the target {head_dim}"
            )
    content: dict[str, Any] = {
        name: getattr(shape, name)
        for name in ("backbone", "hidden", "intermediate", "vocab", "num_heads", "sliding_window", "rms_eps")
    }
    content |= {
        "layer_types": list(shape.layer_types),
        "head_dims": {kind: shape.head_dims[kind] for kind in layers},
        "kv_heads": {kind: kv_heads for kind, (kv_heads, _) in heads.items()},
        "kv_layers": layers,
        "rope_thetas": dict(shape.rope_thetas),
        "rotary_fractions": dict(shape.rotary_fractions),
        "embedding_scale": shape.backbone**0.5,
        "num_clusters": shape.num_clusters,
        "num_selected": shape.num_selected,
        "max_positions": target.max_positions,
    }
    origin = {"imported_from": _MODEL_TYPE}
    config = DrafterConfig("gemma4_mtp", target.fingerprint, target.name, content, origin)
    read_cached_layers(config)  # whether heads fall into groups
    return config, tensors


def _target_layers(target: TargetFacts, kinds: set[str]) -> tuple[dict[str, int], dict[str, tuple[int, int]]]:
    """The target's layers to read, by type, and their key heads and width."""
    if target.directory is None:
        raise CheckpointError(f"the configuration of target {target.name!r} is needed, and is not here")
    text = AutoConfig.from_pretrained(
        target.directory, local_files_only=True, trust_remote_code=False
    ).get_text_config()
    own = last_own_layers(text)
    if lacking := sorted(kinds - set(own)):
        raise CheckpointError(
            f"target {target.name!r} has no {lacking[0]} layer with keys and values of its own"
        )
    layers = {kind: own[kind] for kind in sorted(kinds)}
    heads = layer_heads(text)
    return layers, {kind: heads[layer] for kind, layer in layers.items()}


def write_gemma4_assistant(directory: Path, config: DrafterConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint that transformers can load.

    Raises:
        CheckpointError: another method, sizes that the layout cannot express, or tensors that do not fit, by name.
    """
    if config.method != "gemma4_mtp":
        raise CheckpointError(f"the {_MODEL_TYPE} layout holds gemma4_mtp, not {config.method!r}")
    shape, cached = read_shape(config), read_cached_layers(config)
    check_names(tensors, shape.parameter_shapes())
    if config.shape.get("embedding_scale", shape.backbone**0.5) != shape.backbone**0.5:
        raise CheckpointError(f"shape.embedding_scale: the {_MODEL_TYPE} layout knows Gemma's alone")
    sliding, full = cached.get(SLIDING, cached[FULL]), cached[FULL]
    ropes: dict[str, dict[str, Any]] = {
        kind: {
            "rope_type": "default" if share == 1.0 else "proportional",
            "rope_theta": shape.rope_thetas[kind],
            **({} if share == 1.0 else {"partial_rotary_factor": share}),
        }
        for kind, share in shape.rotary_fractions.items()
    }
    text = {
        "model_type": "gemma4_text",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": len(shape.layer_types),
        "num_kv_shared_layers": len(shape.layer_types),
        "layer_types": list(shape.layer_types),
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": sliding.num_kv_heads,
        "head_dim": sliding.head_dim,
        "num_global_key_value_heads": full.num_kv_heads,
        "global_head_dim": full.head_dim,
        # By this field transformers finds the number of the full layer's key heads.
        "attention_k_eq_v": full.num_kv_heads != sliding.num_kv_heads,
        "sliding_window": shape.sliding_window,
        "rope_parameters": {SLIDING: {"rope_type": "default", "rope_theta": 10000.0}, **ropes},
        "rms_norm_eps": shape.rms_eps,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "max_position_embeddings": config.size("max_positions"),
        "tie_word_embeddings": True,
    }
    content = {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": _MODEL_TYPE,
        "backbone_hidden_size": shape.backbone,
        "use_ordered_embeddings": bool(shape.num_clusters),
        "num_centroids": shape.num_clusters or 2048,
        "centroid_intermediate_top_k": shape.num_selected or 32,
        "tie_word_embeddings": True,
        "text_config": text,
        "dtype": str(tensors["pre_projection.weight"].dtype).removeprefix("torch."),
    }
    write_tensors(directory, "model.safetensors", content, tensors)


def read_model(checkpoint: PublicCheckpoint) -> tuple[Gemma4MtpShape, dict[str, Tensor]]:
    """Sizes and tensors of a checkpoint.

    Raises:
        CheckpointError: naming what is missing, surplus, of another shape or not supported.
    """
    source = checkpoint.config.unchecked()
    if not is_gemma4_assistant(source):
        raise CheckpointError(
            f"config.json: model_type must be {_MODEL_TYPE!r}, not {source.get('model_type')!r}"
        )
    shape, tensors = read_shape_of(source), checkpoint.tensors()
    tensors.pop(_HEAD, None)
    check_names(tensors, shape.parameter_shapes())
    check_order(tensors, shape)
    return shape, tensors


GEMMA4_ASSISTANT = Layout(
    "gemma4_assistant", is_gemma4_assistant, read_gemma4_assistant, write_gemma4_assistant
)
