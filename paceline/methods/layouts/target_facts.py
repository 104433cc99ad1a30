"""Facts about a checkpoint's target that its conversion depends on, read from the target's directory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.methods.checkpoint import CheckpointError
from paceline.methods.target_vocabulary import read_vocabulary
from paceline.model.weights import SafetensorsDir
from paceline.models import model_fingerprint


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """A target's identity and sizes.

    Attributes:
        fingerprint: `paceline.models.model_fingerprint`.
        name: for people.
        hidden: width of its hidden states.
        vocab: number of its tokens.
        max_positions: length of its longest text.
        num_layers: number of its layers, from which layouts without tapped layers derive them; 0 if unknown.
        directory: directory of its weights, None if they are not available.
    """

    fingerprint: str
    name: str
    hidden: int
    vocab: int
    max_positions: int
    num_layers: int = 0
    directory: Path | None = None

    @classmethod
    def read(cls, model_dir: Path) -> TargetFacts:
        """Read a model directory.

        Raises:
            UnknownModelError: the directory is not a model's.
            CheckpointError: its configuration has no usable size, such as a drafter's.
        """
        fingerprint = model_fingerprint(model_dir)  # checks the directory
        config = json.loads((model_dir / "config.json").read_text())
        config = config.get("text_config", config)
        for name in ("hidden_size", "vocab_size"):
            if not isinstance(config.get(name), int) or config[name] < 1:
                raise CheckpointError(
                    f"{model_dir.name!r} is no target: its config.json has no usable {name}"
                )
        return cls(
            fingerprint,
            model_dir.name,
            config["hidden_size"],
            config["vocab_size"],
            int(config.get("max_position_embeddings") or 1 << 20),
            int(config.get("num_hidden_layers") or 0),
            model_dir,
        )

    def embedding(self, dtype: torch.dtype) -> Tensor:
        """The target's token embedding `[vocab, hidden]`.

        Raises:
            CheckpointError: its weights are not available, or have another size than its configuration says.
        """
        if self.directory is None:
            raise CheckpointError(
                f"the embedding of target {self.name!r} is needed, and its weights are not here"
            )
        with SafetensorsDir(self.directory) as weights:
            tensor = weights.get("model.embed_tokens.weight", dtype)
        if tuple(tensor.shape) != (self.vocab, self.hidden):
            raise CheckpointError(
                f"target {self.name!r}: its embedding is {list(tensor.shape)}, not {[self.vocab, self.hidden]}"
            )
        return tensor

    def head(self, dtype: torch.dtype) -> Tensor:
        """The target's output head `[vocab, hidden]`, which is its embedding if it ties them.

        Raises:
            CheckpointError: as of :meth:`embedding`.
        """
        if self.directory is None:
            raise CheckpointError(f"the head of target {self.name!r} is needed, and its weights are not here")
        return read_vocabulary(self.directory, self.vocab, self.hidden, dtype)[1]
