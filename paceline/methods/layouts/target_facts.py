"""What a converter must know of the target that a checkpoint is for; read from the target's directory."""

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
        vocab: its tokens.
        max_positions: positions it has.
        num_layers: its layers, by which layouts that leave tapped layers out choose them; 0 where that is not known.
        directory: where its weights are, None where they are not at hand.
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
            UnknownModelError: it is none.
            CheckpointError: its configuration has no usable size, as a drafter's has none.
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
            CheckpointError: its weights are not at hand, or of another size than its configuration says.
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
        """The target's output head `[vocab, hidden]`, which is its embedding where it ties them.

        Raises:
            CheckpointError: as of :meth:`embedding`.
        """
        if self.directory is None:
            raise CheckpointError(f"the head of target {self.name!r} is needed, and its weights are not here")
        return read_vocabulary(self.directory, self.vocab, self.hidden, dtype)[1]
