"""A decoder's forward pass that can be differentiated: causal, over right-padded batches, in plain torch.

For objectives that train a whole model, or layers of one, of any family that the lean executor serves. Teachers and
serving have faster forwards of their own, and tests hold them together. Knows nothing of losses; which linear maps are
trained, and how, is the caller's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from paceline.contract.errors import TrainingDataError
from paceline.model.architecture import Architecture
from paceline.model.rope import RopeTable
from paceline.target import UnsupportedModelError
from paceline.training.attention import Pattern
from paceline.training.configuration import parse_configuration
from paceline.training.rotary import rotate
from paceline.training.sizes import ModelSizes

LinearMap = Callable[[str, Tensor], Tensor]
"""Applies the linear map of a name, such as ``model.layers.0.self_attn.q_proj``, to ``[..., in]``."""

Rope = tuple[Tensor, Tensor]
"""Cosines and sines of rows' positions, ``[rows, 1, head_dim]`` or ``[texts, rows, 1, head_dim]``, halves repeated."""

LINEAR_NAMES = (
    *(f"self_attn.{x}_proj" for x in "qkvo"),
    *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
)
"""Linear maps of a layer."""

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh"),
}

# In a tuple: what a file names may be nothing that hashes.
_ROPE_TYPES = ("default", *sorted(ROPE_INIT_FUNCTIONS))


def _check_rope_types(config: Any) -> None:
    """Transformers itself takes a type that it does not know, and fails over it when it builds the model."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for entry in [parameters] if "rope_type" in parameters else parameters.values():
        rope_type = entry.get("rope_type") if isinstance(entry, dict) else None
        if rope_type not in _ROPE_TYPES:
            raise TrainingDataError(
                f"rope type {rope_type!r} of a {config.model_type!r} is none of {', '.join(_ROPE_TYPES)}"
            )


class Backbone:
    """What the layers of a decoder compute.

    Args:
        config: its transformers configuration.

    Raises:
        TrainingDataError: a family, or a part of one, that is not computed here.
    """

    def __init__(self, config: Any) -> None:
        _check_rope_types(config)
        try:
            self.arch = Architecture.from_config(config)
        except UnsupportedModelError as error:
            raise TrainingDataError(
                f"the layers of this target cannot be trained: {error}. Drafters that learn from features alone "
                "ask for less: `paceline data continue`, then `paceline data features`"
            ) from None
        if self.arch.attention_softcap or self.arch.final_softcap:
            raise TrainingDataError(f"layers of {self.arch.model_type!r} with soft caps cannot be trained")
        self._config = config

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Backbone:
        """Of a ``config.json``.

        Raises:
            TrainingDataError: transformers cannot read it, or see the class.
        """
        return cls(parse_configuration(config))

    @classmethod
    def llama(cls, sizes: ModelSizes) -> Backbone:
        """A Llama of these sizes, with tied embedding and head."""
        return cls(
            LlamaConfig(
                hidden_size=sizes.hidden,
                num_hidden_layers=sizes.num_layers,
                num_attention_heads=sizes.num_heads,
                num_key_value_heads=sizes.num_kv_heads,
                head_dim=sizes.head_dim,
                intermediate_size=sizes.intermediate,
                vocab_size=sizes.vocab,
                rope_parameters={"rope_type": "default", "rope_theta": sizes.rope_theta},
                rms_norm_eps=sizes.rms_eps,
                max_position_embeddings=sizes.max_positions,
                tie_word_embeddings=True,
            )
        )

    @property
    def num_layers(self) -> int:
        """Layers that are run."""
        return self.arch.num_layers

    @property
    def hidden(self) -> int:
        """Width of a state."""
        return self.arch.hidden_size

    @property
    def vocab(self) -> int:
        """Rows of the embedding."""
        return self.arch.vocab_size

    @property
    def max_positions(self) -> int:
        """Longest text."""
        return self.arch.max_positions

    @property
    def windows(self) -> frozenset[int | None]:
        """Positions that layers see, their own included; None for all."""
        return frozenset(self.arch.windows)

    def scaled(self, embedded: Tensor) -> Tensor:
        """Rows of the embedding as the first layer reads them."""
        scale = self.arch.embed_scale
        return embedded if scale is None else embedded * torch.tensor(scale, dtype=embedded.dtype)

    @staticmethod
    def compute_weights(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """Weights in the compute type, but for those of norms, which are rounded behind their family's offset."""
        return {k: w if k.endswith("norm.weight") else w.to(dtype) for k, w in weights.items()}

    def ropes(self, count: int, dtype: torch.dtype) -> dict[str | None, Rope]:
        """For each kind of layer what turns the first ``count`` positions, ``[count, 1, head_dim]``."""
        return {key: self._rope(key, count, dtype) for key in set(self.arch.rope_keys)}

    def _rope(self, key: str | None, count: int, dtype: torch.dtype) -> Rope:
        table = self._table(key, dtype)
        table.cover(count)
        cos, signed = table.table[:count, None].unbind(2)  # [count, 1, head_dim]
        half = signed[..., signed.shape[-1] // 2 :]
        return cos, torch.cat([half, half], dim=-1)

    @functools.cache  # noqa: B019 (an objective lives as long as its run)
    def _table(self, key: str | None, dtype: torch.dtype) -> RopeTable:
        return RopeTable(self._config, key, self.arch.head_dim, dtype, torch.device("cpu"))

    def final_hidden(
        self,
        weights: Mapping[str, Tensor],
        embedding: Tensor,
        tokens: Tensor,
        linear: LinearMap | None = None,
    ) -> Tensor:
        """Output of the final norm of causal texts.

        Args:
            weights: by transformers name: norms, biases, and what `linear` is not given for; see
                :meth:`compute_weights`.
            embedding: ``[vocab, hidden]`` in the compute type.
            tokens: int64 ``[rows, length]``. Padding stands behind a row's tokens, so that no token sees it.
            linear: how to apply linear maps; None multiplies with the weights.

        Returns:
            ``[rows, length, hidden]`` in the compute type.
        """
        length, dtype = tokens.shape[1], embedding.dtype
        patterns = {window: Pattern.causal(length, dtype, window) for window in self.windows}
        embedded = self.scaled(F.embedding(tokens, embedding))
        return self.run_layers(weights, embedded, self.ropes(length, dtype), patterns, linear)

    def run_layers(
        self,
        weights: Mapping[str, Tensor],
        x: Tensor,
        ropes: Mapping[str | None, Rope],
        patterns: Mapping[int | None, Pattern],
        linear: LinearMap | None = None,
    ) -> Tensor:
        """Output of the final norm of rows that are embedded already.

        Args:
            weights: as in :meth:`final_hidden`.
            x: ``[texts, rows, hidden]``, as :meth:`scaled` gives it.
            ropes: of the rows' positions, for each kind of layer.
            patterns: who sees whom, for each of :attr:`windows`, in the compute type.
            linear: as in :meth:`final_hidden`.

        Returns:
            ``[texts, rows, hidden]``.
        """
        arch = self.arch

        def times(name: str, x: Tensor) -> Tensor:
            return F.linear(x, weights[name + ".weight"], weights.get(name + ".bias"))

        def norm(name: str, x: Tensor) -> Tensor:
            # The offset before rounding, as the engine has it: of 1 - 0.99 bfloat16 would keep two bits.
            weight = (weights[name + ".weight"].float() + arch.norm_offset).to(x.dtype)
            return F.rms_norm(x, (weight.shape[0],), weight, arch.norm_eps)

        apply = linear or times
        texts, rows = x.shape[:2]
        activation = _ACTIVATIONS[arch.activation]
        on_scores = (
            arch.attention_scale * arch.head_dim**0.5
        )  # 1 but where queries are scaled by something else
        before_mlp = "pre_feedforward_layernorm" if arch.has_sandwich_norms else "post_attention_layernorm"
        for i, (rope_key, window) in enumerate(zip(arch.rope_keys, arch.windows, strict=True)):
            layer = f"model.layers.{i}."
            a = norm(layer + "input_layernorm", x)
            q, k, v = (
                apply(layer + f"self_attn.{n}_proj", a).view(texts, rows, -1, arch.head_dim) for n in "qkv"
            )
            if arch.has_qk_norm:
                q, k = norm(layer + "self_attn.q_norm", q), norm(layer + "self_attn.k_norm", k)
            q, k = rotate(q, *ropes[rope_key]), rotate(k, *ropes[rope_key])
            q = q if on_scores == 1.0 else q * on_scores
            mixed = apply(layer + "self_attn.o_proj", patterns[window].attend(q, k, v))
            x = x + (norm(layer + "post_attention_layernorm", mixed) if arch.has_sandwich_norms else mixed)
            m = norm(layer + before_mlp, x)
            gate, up = (apply(layer + f"mlp.{n}_proj", m) for n in ("gate", "up"))
            out = apply(layer + "mlp.down_proj", activation(gate) * up)
            x = x + (norm(layer + "post_feedforward_layernorm", out) if arch.has_sandwich_norms else out)
        return norm("model.norm", x)
