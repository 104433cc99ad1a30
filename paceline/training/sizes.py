"""The numbers of a target that drafters are shaped after, read from its transformers configuration.

For any decoder: what a drafter learns from is the target's features, whatever computed them. Deliberately knows no
forward pass; one that runs certain families only says so itself (`teacher.llama_sizes`, `backbone.Backbone`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.training.errors import TrainingDataError

_FULL_ATTENTION = "full_attention"


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """One decoder.

    Attributes:
        rope_theta: where layers differ in it, that of full attention.
        norm_offset: what is added to a stored norm weight; Gemma before version 4 stores ``weight - 1``.
    """

    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    rope_theta: float
    rms_eps: float
    max_positions: int
    norm_offset: float = 0.0

    @classmethod
    def read(cls, model_dir: Path) -> ModelSizes:
        """Reads a model's directory; see :meth:`from_config`."""
        return cls.from_config(json.loads((model_dir / "config.json").read_text()))

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelSizes:
        """Reads a ``config.json``; of a model with several parts, its text part.

        Raises:
            TrainingDataError: a size is missing, or logits are bent behind the head, which no objective computes.
        """
        text: Mapping[str, Any] = config.get("text_config") or config
        if text.get("final_logit_softcapping"):
            raise TrainingDataError("logits with a soft cap behind the head cannot be learned from")
        try:
            hidden, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
            return cls(
                hidden=hidden,
                num_layers=int(text["num_hidden_layers"]),
                num_heads=heads,
                num_kv_heads=int(text.get("num_key_value_heads") or heads),
                head_dim=int(text.get("head_dim") or hidden // heads),
                intermediate=int(text["intermediate_size"]),
                vocab=int(text["vocab_size"]),
                rope_theta=_rope_theta(text),
                rms_eps=float(text.get("rms_norm_eps", 1e-6)),
                max_positions=int(text.get("max_position_embeddings", 2048)),
                norm_offset=1.0 if _stores_norms_less_one(str(text.get("model_type", ""))) else 0.0,
            )
        except KeyError as missing:
            raise TrainingDataError(f"the target's configuration has no {missing}") from None


def _rope_theta(text: Mapping[str, Any]) -> float:
    rope = text.get("rope_parameters") or {}
    rope = rope.get(_FULL_ATTENTION, rope)
    return float(rope.get("rope_theta", text.get("rope_theta", 10000.0)))


def _stores_norms_less_one(model_type: str) -> bool:
    return model_type.startswith("gemma") and not model_type.startswith("gemma4")
