"""A PARD checkpoint on disk: a complete causal language model in `model/`, and beside it what only Paceline needs.

`model/` has the public layout (a transformers directory whose `config.json` names `pard_token`), so other programs can
serve it as it is, and Paceline can serve a public directory. `config.json` names the method. `model.safetensors`, if
there is one, has PARD-2's projection and the rows of the head that are drafted (`d2t`).

Writes and reads that layout, and checks that its tokenizer is the target's. Called by the drafters, by training and by
the public layout.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.atomic_write import write_json
from paceline.methods.checkpoint import CheckpointError, DrafterConfig, save_drafter
from paceline.methods.whole_model.draft_model import MODEL_DIR, model_directory
from paceline.methods.whole_model.draft_text import SameText
from paceline.methods.whole_model.vocabulary import DraftVocabulary
from paceline.models import copy_tokenizer
from paceline.safetensors_io import write_weights

PROJECTION = "target_proj.weight"
PROJECTION_BIAS = "target_proj.bias"

BESIDE = (PROJECTION, PROJECTION_BIAS, "d2t")
"""Tensors that are stored beside the model."""

MODEL_CONFIG = "model"
"""Key in `DrafterConfig.shape` of the model's transformers configuration, while a layout is converted."""


def mask_token(config: DrafterConfig, vocab: int) -> int:
    """Id whose embedding represents a token that is not known yet.

    Raises:
        CheckpointError: the model has no such id.
    """
    token = config.shape.get("mask_token")
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
        raise CheckpointError(f"mask_token must be a token from 0 to {vocab - 1}, not {token!r}")
    return token


def read_vocabulary(
    directory: Path, config: DrafterConfig, target_dir: Path, own_vocab: int
) -> DraftVocabulary:
    """The tokens that a checkpoint, or a public directory, may draft for a target.

    Args:
        directory: the checkpoint.
        config: its configuration.
        target_dir: the target.
        own_vocab: ids of the drafter's model.

    Raises:
        CheckpointError: its tokenizer is not the target's, or nothing shows that it is. Mask rows differ only in their
            positions, and a text has the target's positions only if it has the target's tokens.
    """
    vocabulary = DraftVocabulary.read(directory, model_directory(directory), config, target_dir, own_vocab)
    if not isinstance(vocabulary.open_text(), SameText):
        raise CheckpointError(
            f"{directory.name!r} has another tokenizer than target {target_dir.name!r}: a drafter with mask tokens "
            "must share its target's"
        )
    return vocabulary


def save_pard(
    folder: Path, config: DrafterConfig, tensors: Mapping[str, Tensor], tokenizer_dir: Path | None = None
) -> None:
    """Write a checkpoint.

    Args:
        folder: directory to write.
        config: of the drafter; `shape["model"]` is the model's transformers configuration, and is moved to `model/`.
        tensors: the model's by their transformers names, and those of `BESIDE`.
        tokenizer_dir: a directory with the drafter's tokenizer, by which loading checks that a target fits.
    """
    shape = dict(config.shape)
    model_config = shape.pop(MODEL_CONFIG)
    model = folder / MODEL_DIR
    write_weights(model / "model.safetensors", {k: v for k, v in tensors.items() if k not in BESIDE})
    write_json(model / "config.json", model_config)
    if tokenizer_dir is not None:
        copy_tokenizer(tokenizer_dir, model)
    written = DrafterConfig(
        config.method, config.target_fingerprint, config.target_name, shape, config.training
    )
    beside = {k: v for k, v in tensors.items() if k in BESIDE}
    if beside:
        save_drafter(folder, written, beside)
    else:
        write_json(folder / "config.json", asdict(written))


def read_model_config(model_dir: Path) -> dict[str, Any]:
    """A model's transformers configuration.

    Raises:
        CheckpointError: it is missing, or is not a JSON object.
    """
    try:
        content = json.loads((model_dir / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{model_dir.name!r} has no readable config.json: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{model_dir.name!r}: config.json is not a JSON object")
    return content
