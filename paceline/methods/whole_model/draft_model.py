"""A small model that gives logits only of the tokens that may be drafted.

The target engine runs it. Its head is cut to those tokens if possible: the head is much of a small model's work (28 of
SmolLM2-135M's 135 million weights, 168 of Gemma 3 270M's 268). Called by the drafters that are complete models.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from paceline.methods.checkpoint import CheckpointError
from paceline.model.architecture import LEAN_MODEL_TYPES
from paceline.model.weights import SafetensorsDir
from paceline.target import Device, SequenceRows, TapSpec, TargetEngine, UnsupportedModelError

MODEL_DIR = "model"

MAX_CUT_FRACTION = 0.75
"""A head of which a larger fraction is drafted is not cut unless the checkpoint says so: it would save little."""


def model_directory(directory: Path) -> Path:
    """Directory of a checkpoint's model: `model/`, or the checkpoint itself if transformers saved it."""
    return directory / MODEL_DIR if (directory / MODEL_DIR).is_dir() else directory


def load_engine(directory: Path, device: Device, dtype: torch.dtype) -> TargetEngine:
    """An engine that runs a checkpoint's model.

    Raises:
        CheckpointError: the engine cannot run the model.
    """
    model_dir = model_directory(directory)
    if not any(model_dir.glob("*.safetensors")):
        raise CheckpointError(
            f"{model_dir.name!r} has no safetensors weights; pickled ones are never read: convert them with "
            "`save_pretrained` of transformers"
        )
    where = device.kind if device.kind == "cpu" else f"{device.kind}:{device.index}"
    try:
        return TargetEngine.load(model_dir, where, dtype)
    except UnsupportedModelError as error:
        raise CheckpointError(f"{directory.name!r}: {error}") from None


class DraftModel:
    """Runs rows like the engine, for a part of the vocabulary."""

    def __init__(
        self, engine: TargetEngine, own_ids: Tensor | None = None, head: CutHead | None = None
    ) -> None:
        """A model with logits of some tokens, int64 `[draft_vocab]`, from a cut head if there is one."""
        self.engine = engine
        self._own_ids = None if own_ids is None else own_ids.to(engine.device.torch_device)
        self._head = head
        if head is not None:
            engine.add_tap(TapSpec(layers=(), norm_final=True))

    @classmethod
    def load(
        cls, model_dir: Path, engine: TargetEngine, own_ids: Tensor | None, prune: bool | None
    ) -> DraftModel:
        """The model of a directory that an engine has loaded.

        Args:
            model_dir: where its head is read from.
            engine: runs it.
            own_ids: the tokens that may be drafted; None for all.
            prune: cut the head to them; None does so if it is possible and saves much.

        Raises:
            CheckpointError: the head must be cut and cannot be.
        """
        if own_ids is None or prune is False:
            return cls(engine, own_ids)
        shape = engine.shape
        if prune is None and (
            shape.model_type not in LEAN_MODEL_TYPES or len(own_ids) > MAX_CUT_FRACTION * shape.vocab_size
        ):
            return cls(engine, own_ids)
        return cls(engine, own_ids, CutHead.read(model_dir, own_ids, engine.device, engine.weight_dtype))

    def step(self, batch: Sequence[SequenceRows]) -> list[Tensor]:
        """Logits `[rows wanted, draft_vocab]` float32 of each sequence; see `TargetEngine.step`."""
        if self._own_ids is None:
            return self.engine.step(batch).logits
        if self._head is None:
            return [logits[:, self._own_ids] for logits in self.engine.step(batch).logits]
        wanted = [rows.logit_rows() for rows in batch]
        output = self.engine.step([replace(rows, num_logits="none") for rows in batch])
        with torch.inference_mode():
            states = [part[list(rows)] for part, rows in zip(output.features, wanted, strict=True)]
            return list(self._head(torch.cat(states)).split([len(rows) for rows in wanted]))


class CutHead:
    """Some rows of a head.

    Args:
        weight: `[draft_vocab, hidden]` in the type of the engine's weights.
        softcap: the model's bound on logits, if it has one.
        device: where it runs.
    """

    def __init__(self, weight: Tensor, softcap: float | None, device: Device) -> None:
        self._linear = device.pack(weight)
        self._softcap = softcap

    def __call__(self, states: Tensor) -> Tensor:
        """From `[rows, hidden]` after the final norm to logits `[rows, draft_vocab]` float32."""
        logits = self._linear(states).float()
        return logits if self._softcap is None else self._softcap * torch.tanh(logits / self._softcap)

    @classmethod
    def read(cls, model_dir: Path, own_ids: Tensor, device: Device, dtype: torch.dtype) -> CutHead:
        """The rows of a model's head.

        Raises:
            CheckpointError: its head cannot be cut.
        """
        config = json.loads((model_dir / "config.json").read_text())
        if config.get("model_type") not in LEAN_MODEL_TYPES:  # others may scale their logits, or add to them
            raise CheckpointError(f"the head of model type {config.get('model_type')!r} cannot be cut")
        try:
            with torch.inference_mode(), SafetensorsDir(model_dir) as weights:
                name = "lm_head.weight" if "lm_head.weight" in weights else "model.embed_tokens.weight"
                rows = weights.get(name, dtype)[own_ids]
                return cls(rows.contiguous(), config.get("final_logit_softcapping"), device)
        except UnsupportedModelError as error:
            raise CheckpointError(str(error)) from None
