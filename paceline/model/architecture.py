"""The architecture of a decoder of the Llama family, read from its transformers config.

Decides whether our own executors run a model exactly, and names its numbers once. It does not know tensors or weights.
Called when an executor is chosen, and by training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.model.block import BlockShape
from paceline.model.weights import UnsupportedModelError

LEAN_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
# Rope variants whose frequencies do not depend on the length of the sequence.
STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
SUPPORTED_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


@dataclass(frozen=True, slots=True)
class Architecture:
    """One decoder of the Llama family.

    Attributes:
        windows: sliding window of each layer, None for full attention.
        rope_keys: which rope table each layer uses; a layer type, or None where the model has one table.
        norm_offset: added to norm weights when they are loaded (Gemma stores `weight - 1`).
        has_sandwich_norms: norms after attention and after the MLP as well as before them (Gemma).
        attention_scale: factor on attention scores.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    norm_offset: float
    activation: str
    has_qk_norm: bool
    has_sandwich_norms: bool
    has_tied_head: bool
    embed_scale: float | None
    attention_scale: float
    attention_softcap: float | None
    final_softcap: float | None
    windows: tuple[int | None, ...]
    rope_keys: tuple[str | None, ...]

    def block(self, index: int) -> BlockShape:
        """Shape of layer `index`."""
        return BlockShape(
            hidden=self.hidden_size,
            intermediate=self.intermediate_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            norm_eps=self.norm_eps,
            attention_scale=self.attention_scale,
            activation=self.activation,
            attention_softcap=self.attention_softcap,
            window=self.windows[index],
            rope_key=self.rope_keys[index],
            has_qk_norm=self.has_qk_norm,
            has_sandwich_norms=self.has_sandwich_norms,
        )

    @classmethod
    def from_config(cls, config: Any) -> Architecture:
        """Read a transformers config.

        Raises:
            UnsupportedModelError: the lean executor cannot run this model exactly; the generic one may.
        """
        kind = config.model_type
        if kind not in LEAN_MODEL_TYPES:
            raise UnsupportedModelError(f"model type {kind!r} is not one of {', '.join(LEAN_MODEL_TYPES)}")
        is_gemma = kind.startswith("gemma")
        activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "silu")
        if activation not in SUPPORTED_ACTIVATIONS:
            raise UnsupportedModelError(f"activation {activation!r} is not one of {SUPPORTED_ACTIVATIONS}")
        if getattr(config, "use_bidirectional_attention", None):
            raise UnsupportedModelError("bidirectional attention has no left-to-right cache")
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        layer_types = _layer_types(config)
        rope_keys = _rope_keys(config, layer_types)
        scale_base = config.query_pre_attn_scalar if is_gemma else head_dim
        return cls(
            model_type=kind,
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            vocab_size=config.vocab_size,
            max_positions=config.max_position_embeddings,
            norm_eps=config.rms_norm_eps,
            norm_offset=1.0 if is_gemma else 0.0,
            activation=activation,
            has_qk_norm=kind in ("qwen3", "gemma3_text"),
            has_sandwich_norms=is_gemma,
            has_tied_head=bool(config.tie_word_embeddings),
            embed_scale=float(config.hidden_size) ** 0.5 if is_gemma else None,
            attention_scale=float(scale_base) ** -0.5,
            attention_softcap=getattr(config, "attn_logit_softcapping", None) if is_gemma else None,
            final_softcap=getattr(config, "final_logit_softcapping", None) if is_gemma else None,
            windows=tuple(
                config.sliding_window if layer_type == "sliding_attention" else None
                for layer_type in layer_types
            ),
            rope_keys=rope_keys,
        )


def _layer_types(config: Any) -> list[str]:
    count = config.num_hidden_layers
    if config.model_type == "mistral":
        return ["sliding_attention" if config.sliding_window else "full_attention"] * count
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return ["full_attention"] * count
    if not set(layer_types) <= {"full_attention", "sliding_attention"}:
        raise UnsupportedModelError(f"layer types {sorted(set(layer_types))} need the generic executor")
    return list(layer_types)


def _rope_keys(config: Any, layer_types: list[str]) -> tuple[str | None, ...]:
    parameters = config.rope_parameters
    is_nested = "rope_type" not in parameters
    keys: tuple[str | None, ...] = tuple(layer_types) if is_nested else (None,) * len(layer_types)
    for key in set(keys):
        entry = parameters if key is None else parameters[key]
        if entry["rope_type"] not in STATIC_ROPE_TYPES:
            raise UnsupportedModelError(f"rope type {entry['rope_type']!r} depends on the sequence length")
        if entry.get("partial_rotary_factor") not in (None, 1.0):
            raise UnsupportedModelError("partial rotary embeddings need the generic executor")
    return keys
