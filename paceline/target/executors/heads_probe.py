"""Which key heads a transformers model brings to attention, seen in one pass when it is loaded."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.model.torch_block import Scoring
from paceline.model.weights import UnsupportedModelError


class HeadsProbe:
    """Stands in for a step's plan in one pass, to see which key heads of what width each layer brings to attention.

    Configurations name these numbers in many ways; the pass does not depend on names.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[int, int]] = {}

    def attend(self, queries: Tensor, keys_values: Tensor, layer: int, scoring: Scoring) -> Tensor:
        """Note a layer's heads; attention itself gives zeros."""
        self._found[layer] = (keys_values.shape[1] // 2, keys_values.shape[2])
        return torch.zeros_like(queries).flatten(1)

    def layer_heads(self, num_layers: int) -> tuple[tuple[int, int], ...]:
        """Key heads of each layer, and the larger width of keys and values.

        Raises:
            UnsupportedModelError: some layers have no attention, or attention has other layers.
        """
        layers = range(num_layers)
        if missing := [layer for layer in layers if layer not in self._found]:
            raise UnsupportedModelError(
                f"layers {missing} have no attention over keys and values: linear attention and other states of a "
                "sequence are not kept"
            )
        if surplus := sorted(set(self._found) - set(layers)):
            raise UnsupportedModelError(f"attention of layers {surplus}, which the model does not list")
        return tuple(self._found[layer] for layer in layers)
