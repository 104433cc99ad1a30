"""A small model cut from a target: some of its layers, with its embedding, final norm and head.

Training of an independent drafter and of PARD starts from one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from paceline.contract.errors import TrainingDataError
from paceline.training.configuration import parse_configuration, read_config_json, text_part
from paceline.training.target_weights import EMBEDDING, HEAD, check_target_tensors, read_weights


def cut_layers(num_layers: int, keep: int) -> list[int]:
    """Target layers that a cut keeps: half of ``keep``, rounded up, from the beginning and the rest from the end.

    Raises:
        TrainingDataError: ``keep`` is 0, or more than the target has.
    """
    if not 1 <= keep <= num_layers:
        raise TrainingDataError(f"cannot cut {keep} layers from a target of {num_layers}")
    first = (keep + 1) // 2
    return [*range(first), *range(num_layers - (keep - first), num_layers)]


def cut_model(model_dir: Path, num_layers: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and tensors of a model that keeps some layers; see :func:`cut_layers`.

    Raises:
        TrainingDataError: the number of layers does not fit, the model has several parts, or it has no embedding or
            head.
    """
    config = read_config_json(model_dir)
    parsed = parse_configuration(config)
    if text_part(parsed) is not parsed:
        raise TrainingDataError(
            f"a {parsed.model_type!r} has several parts and cannot be cut; save its text model on its own"
        )
    kept = cut_layers(parsed.num_hidden_layers, num_layers)
    check_target_tensors(model_dir)
    source = read_weights(model_dir)
    weights = {k: v for k, v in source.items() if not k.startswith("model.layers.")}
    for new, old in enumerate(kept):
        prefix = f"model.layers.{old}."
        weights |= {
            f"model.layers.{new}." + k[len(prefix) :]: v for k, v in source.items() if k.startswith(prefix)
        }
    config["num_hidden_layers"] = num_layers
    # Families derive which layers have windows from the layers' number (`max_window_layers`, a pattern), which changed.
    if (kinds := getattr(parsed, "layer_types", None)) is not None:
        config["layer_types"] = [kinds[old] for old in kept]
    return config, weights


def split_shared(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, nn.Parameter]]:
    """Embedding and head, which stay frozen, and float32 parameters of all other tensors."""
    shared = {k: v for k, v in weights.items() if k in (EMBEDDING, HEAD)}
    return shared, {k: nn.Parameter(v.float().clone()) for k, v in weights.items() if k not in shared}
