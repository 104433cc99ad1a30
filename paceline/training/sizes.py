"""Sizes of a target, read from its transformers configuration, and of drafters whose blocks are like the target's.

For any decoder whose logits are the product of its head and its final state: a drafter learns from features, whatever
computed them. Knows no forward pass; forwards that run certain families alone refuse the others
themselves (`teacher.llama_sizes`, `backbone.Backbone`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from paceline.contract.errors import TrainingDataError
from paceline.model.block import BlockShape
from paceline.training.configuration import parse_configuration, read_config_json, text_part

_FULL_ATTENTION = "full_attention"

# What models of transformers do to logits, or to states before the head, by the name in their configurations: Gemma 2,
# RecurrentGemma, xLSTM; Granite and MiniCPM 3, Cohere and MPT, Falcon H1, Muse, Inkling.
_SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_SCALES = (
    "logits_scaling",
    "logit_scale",
    "lm_head_multiplier",
    "output_multiplier",
    "logits_mup_width_multiplier",
)


def default_tap_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers whose *entering* residual stream EAGLE-3 reads: 2, L//2, L-3 (2503.01840 and its public code)."""
    if num_layers < 4:
        return (0, num_layers // 2, num_layers)
    return (2, num_layers // 2, num_layers - 3)


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """One decoder.

    Attributes:
        rope_theta: base of the rotary frequencies; of full attention, where layers differ.
        norm_offset: added to a stored norm weight; Gemma before version 4 stores ``weight - 1``.
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
        return cls.from_config(read_config_json(model_dir))

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelSizes:
        """Reads a ``config.json``; for a model with several parts, its text part.

        Raises:
            TrainingDataError: transformers cannot read it, a size is missing or differs between layers, or the model
                caps or scales logits after the head, which no objective computes.
        """
        parsed = parse_configuration(config)
        text = text_part(parsed)
        for part in (text, parsed):
            _check_head(part)
        # Gemma 4's layers differ in heads; a drafter's layers have the heads that the configuration itself names.
        text.allow_global_per_layer_attribute_access = True
        hidden, heads = _size(text, "hidden_size"), _size(text, "num_attention_heads")
        return cls(
            hidden=hidden,
            num_layers=_size(text, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=_size(text, "num_key_value_heads", heads),
            head_dim=_size(text, "head_dim", hidden // heads),
            intermediate=_size(text, "intermediate_size"),
            vocab=_size(text, "vocab_size"),
            rope_theta=_rope_theta(text),
            rms_eps=float(getattr(text, "rms_norm_eps", None) or 1e-6),
            max_positions=_size(text, "max_position_embeddings", 2048),
            norm_offset=1.0 if _stores_norms_less_one(str(text.model_type)) else 0.0,
        )

    def drafter_sizes(self) -> dict[str, Any]:
        """Fields of :class:`DrafterSizes` for a drafter whose blocks are like this model's."""
        shared = {f.name: getattr(self, f.name) for f in fields(DrafterSizes) if f.name != "target_vocab"}
        return {**shared, "target_vocab": self.vocab}


@dataclass(frozen=True, slots=True)
class DrafterSizes:
    """Sizes of a drafter whose blocks are like its target's; a checkpoint's ``shape`` has them by these names."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    target_vocab: int
    rope_theta: float
    rms_eps: float

    def block_shape(self, has_qk_norm: bool = False) -> BlockShape:
        """A decoder block of the drafter."""
        return BlockShape(
            hidden=self.hidden,
            intermediate=self.intermediate,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            norm_eps=self.rms_eps,
            attention_scale=self.head_dim**-0.5,
            has_qk_norm=has_qk_norm,
        )


def _check_head(config: Any) -> None:
    if any(getattr(config, name, None) for name in _SOFT_CAPS):
        raise TrainingDataError("drafters cannot learn from logits with a soft cap after the head")
    for name in _SCALES:
        scale = getattr(config, name, None)
        if scale not in (None, 1):
            raise TrainingDataError(f"drafters cannot learn from logits that are scaled ({name} {scale})")


def _size(text: Any, name: str, default: int | None = None) -> int:
    value = getattr(text, name, None)
    value = default if value is None else value
    if value is None:
        raise TrainingDataError(f"the configuration of a {text.model_type!r} has no {name!r}")
    if not isinstance(value, int) or value < 1:
        raise TrainingDataError(f"the configuration of a {text.model_type!r}: {name!r} is {value!r}, no size")
    return value


def _rope_theta(text: Any) -> float:
    rope = getattr(text, "rope_parameters", None) or {}
    rope = rope.get(_FULL_ATTENTION, rope)
    return float(rope.get("rope_theta", 10000.0))


def _stores_norms_less_one(model_type: str) -> bool:
    return model_type.startswith("gemma") and not model_type.startswith("gemma4")
