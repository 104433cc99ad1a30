"""What a converter needs to know of the target that a public checkpoint was made for.

Responsible for reading it from the target's directory. Knows no format. Called by `exchange.py` and handed to formats.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.drafters.checkpoint import CheckpointError
from paceline.models import model_fingerprint
from paceline.target.weights import SafetensorsDir


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """A target.

    Attributes:
        directory: where its configuration and weights are.
        fingerprint: `paceline.models.model_fingerprint` of it.
        name: for people.
        architectures: class names as its `config.json` gives them.
        hidden: width of its residual stream.
        vocab: rows of its embedding.
        num_layers: decoder layers.
        max_positions: longest text it takes.
    """

    directory: Path
    fingerprint: str
    name: str
    architectures: tuple[str, ...]
    hidden: int
    vocab: int
    num_layers: int
    max_positions: int

    @classmethod
    def read(cls, directory: Path) -> TargetFacts:
        """Facts of the model in a directory.

        Raises:
            CheckpointError: its configuration lacks a size.
        """
        content = json.loads((directory / "config.json").read_text())
        text = content.get("text_config") or content

        def size(name: str) -> int:
            value = text.get(name)
            if not isinstance(value, int) or value < 1:
                raise CheckpointError(f"target {directory.name!r}: config.json has no usable {name}")
            return value

        return cls(
            directory=directory,
            fingerprint=model_fingerprint(directory),
            name=directory.name,
            architectures=tuple(str(name) for name in content.get("architectures") or ()),
            hidden=size("hidden_size"),
            vocab=size("vocab_size"),
            num_layers=size("num_hidden_layers"),
            max_positions=size("max_position_embeddings"),
        )

    def embedding(self, dtype: torch.dtype) -> Tensor:
        """The target's token embedding `[vocab, hidden]`."""
        return self._weight("model.embed_tokens.weight", dtype)

    def _weight(self, name: str, dtype: torch.dtype) -> Tensor:
        with SafetensorsDir(self.directory) as weights:
            tensor = weights.get(name, dtype)
        if tuple(tensor.shape) != (self.vocab, self.hidden):
            raise CheckpointError(
                f"target {self.name!r}: {name} is {list(tensor.shape)}, not {[self.vocab, self.hidden]}"
            )
        return tensor
