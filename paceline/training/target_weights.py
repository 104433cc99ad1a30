"""The tensors that drafters share with their target: its embedding, its head and its final norm.

Responsible for reading tensors of a model directory, for the names that transformers gives a plain decoder, and for
refusing a target with other names before anything long begins. Knows no layers. Called by the methods' `recipe.py` and
by the commands that make data.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from paceline.contract.errors import TrainingDataError
from paceline.training.configuration import parse_configuration, read_config_json, text_part

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_FINAL_NORM = "model.norm.weight"


def check_target_tensors(model_dir: Path) -> None:
    """Checks the names of embedding and head, without reading them.

    Raises:
        TrainingDataError: embedding or head is missing or has another name, or the head is more than a product.
    """
    names = tensor_names(model_dir)
    config = parse_configuration(read_config_json(model_dir))
    is_tied = any(getattr(part, "tie_word_embeddings", False) for part in (config, text_part(config)))
    missing = [name for name in (EMBEDDING, *(() if is_tied else (HEAD,))) if name not in names]
    if missing:
        raise TrainingDataError(
            f"{model_dir.name} has no tensor {' and no '.join(map(repr, missing))}: drafters can be trained for "
            "targets whose embedding and head have these names"
        )
    surplus = sorted(name for name in names if name.startswith("lm_head.") and name != HEAD)
    if surplus:
        raise TrainingDataError(
            f"{model_dir.name} has {surplus[0]!r}: drafters learn from a head that is a product and nothing else"
        )


def read_embedding_and_head(model_dir: Path) -> tuple[Tensor, Tensor]:
    """Both ``[vocab, hidden]``, in the stored type; one tensor where the target shares it.

    Raises:
        TrainingDataError: see :func:`check_target_tensors`.
    """
    check_target_tensors(model_dir)
    weights = read_weights(model_dir, (EMBEDDING, HEAD))
    return weights[EMBEDDING], weights.get(HEAD, weights[EMBEDDING])


def read_final_norm(model_dir: Path, norm_offset: float) -> Tensor:
    """Weights of the final norm, float32 ``[hidden]``.

    Args:
        model_dir: the target.
        norm_offset: added to the stored weight by its family.

    Raises:
        TrainingDataError: there is no such tensor.
    """
    weights = read_weights(model_dir, (_FINAL_NORM,))
    if _FINAL_NORM not in weights:
        raise TrainingDataError(f"{model_dir.name} has no tensor {_FINAL_NORM!r}")
    return weights[_FINAL_NORM].float() + norm_offset


def read_weights(model_dir: Path, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Reads the tensors of a safetensors checkpoint (one file or an index of several).

    Args:
        model_dir: of the checkpoint.
        names: tensors to read if they exist; None reads all.

    Raises:
        TrainingDataError: a file is missing.
    """
    weights: dict[str, Tensor] = {}
    for path in _weight_files(model_dir):
        with safe_open(path, framework="pt") as handle:
            for key in handle.keys():  # noqa: SIM118 (a safetensors handle is not a mapping)
                if names is None or key in names:
                    weights[key] = handle.get_tensor(key)
    return weights


def tensor_names(model_dir: Path) -> set[str]:
    """Names of all tensors of a safetensors checkpoint; reads no tensor.

    Raises:
        TrainingDataError: a file is missing.
    """
    names: set[str] = set()
    for path in _weight_files(model_dir):
        with safe_open(path, framework="pt") as handle:
            names |= set(handle.keys())
    return names


def _weight_files(model_dir: Path) -> list[Path]:
    index = model_dir / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    for name in names:
        if not (model_dir / name).exists():
            raise TrainingDataError(f"{model_dir}: no {name}")
    return [model_dir / name for name in names]
