"""The differentiable forward pass of a whole decoder, over right-padded batches, in plain torch.

For objectives that train a whole model, or layers of one, of any family that the lean executor serves. The teacher and
serving have faster forwards of their own; tests compare them with this one. Knows no losses. The caller decides which
linear maps are trained, and how.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
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
from paceline.training.block import DifferentiableBlock, LinearMap, Rotation, rms_norm
from paceline.training.configuration import parse_configuration
from paceline.training.sizes import ModelSizes

# A tuple and not a set: the type that a file names may not be hashable.
_ROPE_TYPES = ("default", *sorted(ROPE_INIT_FUNCTIONS))


def _check_rope_types(config: Any) -> None:
    """Transformers accepts an unknown type, and fails when it builds the model."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for entry in [parameters] if "rope_type" in parameters else parameters.values():
        rope_type = entry.get("rope_type") if isinstance(entry, dict) else None
        if rope_type not in _ROPE_TYPES:
            raise TrainingDataError(
                f"rope type {rope_type!r} of a {config.model_type!r} is none of {', '.join(_ROPE_TYPES)}"
            )


class Backbone:
    """The layers of a decoder.

    Args:
        config: the decoder's transformers configuration.

    Raises:
        TrainingDataError: the family, or a part of it, is not supported.
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
        """Reads a ``config.json``.

        Raises:
            TrainingDataError: transformers cannot read it, or the family is not supported.
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
        """Number of layers."""
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
        """Sliding windows of the layers, the row itself included; None for full attention."""
        return frozenset(self.arch.windows)

    def scaled(self, embedded: Tensor) -> Tensor:
        """Rows of the embedding as the first layer reads them."""
        scale = self.arch.embed_scale
        return embedded if scale is None else embedded * torch.tensor(scale, dtype=embedded.dtype)

    @staticmethod
    def compute_weights(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """Weights in the compute type. Norms keep their type: the family's offset is added before they are rounded."""
        return {k: w if k.endswith("norm.weight") else w.to(dtype) for k, w in weights.items()}

    def rotations(self, count: int, dtype: torch.dtype) -> dict[str | None, Rotation]:
        """Cosines and sines of the first ``count`` positions, ``[count, 1, head_dim]``, for each kind of layer."""
        return {key: self._rotation(key, count, dtype) for key in set(self.arch.rope_keys)}

    def _rotation(self, key: str | None, count: int, dtype: torch.dtype) -> Rotation:
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
            weights: by transformers name, as :meth:`compute_weights` gives them. Linear maps may be missing where
                ``linear`` applies them.
            embedding: ``[vocab, hidden]`` in the compute type.
            tokens: int64 ``[rows, length]``. Padding follows a row's tokens, so that no token sees it.
            linear: applies linear maps; None multiplies with the weights.

        Returns:
            ``[rows, length, hidden]`` in the compute type.
        """
        length, dtype = tokens.shape[1], embedding.dtype
        patterns = {window: Pattern.causal(length, dtype, window) for window in self.windows}
        embedded = self.scaled(F.embedding(tokens, embedding))
        return self.run_layers(weights, embedded, self.rotations(length, dtype), patterns, linear)

    def run_layers(
        self,
        weights: Mapping[str, Tensor],
        x: Tensor,
        rotations: Mapping[str | None, Rotation],
        patterns: Mapping[int | None, Pattern],
        linear: LinearMap | None = None,
    ) -> Tensor:
        """Output of the final norm of embedded rows.

        Args:
            weights: as in :meth:`final_hidden`.
            x: ``[texts, rows, hidden]``, as :meth:`scaled` gives it.
            rotations: of the rows' positions, for each kind of layer.
            patterns: who sees whom, for each of :attr:`windows`, in the compute type.
            linear: as in :meth:`final_hidden`.

        Returns:
            ``[texts, rows, hidden]``.
        """
        offset = self.arch.norm_offset
        for i in range(self.num_layers):
            shape = self.arch.block(i)
            block = DifferentiableBlock(shape, weights, f"model.layers.{i}.", linear, offset)
            read = block.norm("input_layernorm", x)
            x = block.forward(read, x, rotations[shape.rope_key], patterns[shape.window].attend)
        return rms_norm(x, weights["model.norm.weight"], self.arch.norm_eps, offset)
