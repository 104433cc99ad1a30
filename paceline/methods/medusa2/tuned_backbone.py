"""A target that is tuned by low-rank updates of its linear maps (LoRA, Hu et al., 2106.09685).

Responsible for the updates, the tuned forward pass and the merged weights, and for writing them as a target directory.
Knows no heads and no losses; called by :mod:`paceline.methods.medusa2.objective`.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.fetch import PROVENANCE_FILE
from paceline.safetensors_io import write_weights
from paceline.training.backbone import Backbone
from paceline.training.block import LINEAR_NAMES
from paceline.training.configuration import read_config_json
from paceline.training.target_weights import EMBEDDING, HEAD, check_target_tensors, read_weights

PREFIX = "backbone."
"""Prefix of the names of all its parameters."""


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Size of the updates: ``W + alpha / rank * B A``, with ``A`` ``[rank, in]`` and ``B`` ``[out, rank]``.

    Attributes:
        rank: of each update.
        alpha: its scale.
        dropout: fraction of an update's inputs that training sets to zero.
    """

    rank: int = 32
    alpha: float = 16.0
    dropout: float = 0.05

    @property
    def scale(self) -> float:
        """Factor on ``B A``."""
        return self.alpha / self.rank


class TunedBackbone:
    """A model with updates of all linear maps of its layers; the updates start at zero.

    Args:
        model_dir: the original target.
        settings: of the updates.
        seed: of their starting values.
        dtype: compute type; the updates stay float32.

    Raises:
        TrainingDataError: training does not support its layers, or its embedding and head.
    """

    def __init__(self, model_dir: Path, settings: LoraSettings, seed: int, dtype: torch.dtype) -> None:
        self.model_dir = model_dir
        self.shape = Backbone.from_config(read_config_json(model_dir))
        check_target_tensors(model_dir)
        self.settings = settings
        self.dtype = dtype
        self._source = read_weights(model_dir)
        self._weights = self.shape.compute_weights(self._source, dtype)
        self._embedding = self._weights[EMBEDDING]
        self.head = self._weights.get(HEAD, self._embedding)  # [vocab, hidden]
        random = torch.Generator().manual_seed(seed)
        self.parameters: dict[str, nn.Parameter] = {}
        for name in self._linear_names():
            columns, width = self._source[name + ".weight"].shape
            start = (torch.rand(settings.rank, width, generator=random) * 2 - 1) * width**-0.5
            self.parameters[f"{PREFIX}{name}.lora_a"] = nn.Parameter(start)
            self.parameters[f"{PREFIX}{name}.lora_b"] = nn.Parameter(torch.zeros(columns, settings.rank))

    def _linear_names(self) -> list[str]:
        return [f"model.layers.{i}.{name}" for i in range(self.shape.num_layers) for name in LINEAR_NAMES]

    def hidden(self, tokens: Tensor, *, is_training: bool) -> Tensor:
        """Output of the tuned target's final norm: int64 ``[rows, length] -> [rows, length, hidden]``."""

        read = kept = tokens  # the newest input, and the same after dropout

        def linear(name: str, x: Tensor) -> Tensor:
            nonlocal read, kept
            if x is not read:  # maps with one input share its dropout: drawing again cost a tenth of a step
                read, kept = x, F.dropout(x, self.settings.dropout, is_training)
            a, b = (self.parameters[f"{PREFIX}{name}.lora_{part}"] for part in "ab")
            low = F.linear(kept, a.to(self.dtype)).flatten(0, 1)
            of_target = F.linear(x, self._weights[name + ".weight"], self._weights.get(name + ".bias"))
            scaled = (self.settings.scale * b).to(self.dtype)
            return torch.addmm(of_target.flatten(0, 1), low, scaled.T).view_as(of_target)

        return self.shape.final_hidden(self._weights, self._embedding, tokens, linear)

    def merged(self) -> dict[str, Tensor]:
        """All weights with the updates added, in the types of the source."""
        merged = dict(self._source)
        for name in self._linear_names():
            source = self._source[name + ".weight"]
            a, b = (self.parameters[f"{PREFIX}{name}.lora_{part}"].detach() for part in "ab")
            if bool(b.any()):
                merged[name + ".weight"] = (source.float() + self.settings.scale * (b @ a)).to(source.dtype)
        return merged

    def write(self, folder: Path) -> None:
        """Writes the tuned target as a model directory; replaces an existing one as a whole.

        Copies tokenizer, chat template and licence, but not the file that says where the original weights came from.
        """
        partial = folder.with_name(f".{folder.name}.part")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for file in self.model_dir.iterdir():
            is_of_weights = file.name.endswith((".safetensors", ".safetensors.index.json", PROVENANCE_FILE))
            if file.is_file() and not is_of_weights:
                shutil.copyfile(file, partial / file.name)
        write_weights(partial / "model.safetensors", self.merged())
        shutil.rmtree(folder, ignore_errors=True)
        partial.replace(folder)
