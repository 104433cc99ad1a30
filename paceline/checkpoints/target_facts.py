"""What a converter must know of the target that a checkpoint is for; the caller reads it from the target."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

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
    """

    fingerprint: str
    name: str
    hidden: int
    vocab: int
    max_positions: int

    @classmethod
    def read(cls, model_dir: Path) -> TargetFacts:
        """Read a model directory.

        Raises:
            UnknownModelError: it is none.
        """
        fingerprint = model_fingerprint(model_dir)  # checks the directory
        config = json.loads((model_dir / "config.json").read_text())
        config = config.get("text_config", config)
        return cls(
            fingerprint,
            model_dir.name,
            int(config["hidden_size"]),
            int(config["vocab_size"]),
            int(config.get("max_position_embeddings") or 1 << 20),
        )
