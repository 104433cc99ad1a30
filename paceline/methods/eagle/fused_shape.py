"""Sizes of the fused layer of EAGLE-3 and P-EAGLE in training, and what its attention reads.

DFlash and DSpark, which read fused features of the target too, extend these sizes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.methods.checkpoint import DrafterConfig
from paceline.methods.eagle.fused_layer import parameter_shapes
from paceline.training.block import DifferentiableBlock
from paceline.training.sizes import DrafterSizes

FUSED = "midlayer."
"""Prefix of the fused layer's tensors."""


@dataclass(frozen=True, slots=True)
class Eagle3Shape(DrafterSizes):
    """Sizes of an EAGLE-3 draft layer; ``num_taps`` target layers are joined by ``fc``."""

    target_hidden: int
    num_taps: int
    draft_vocab: int

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Trained tensors by their names in the public checkpoint format."""
        return trained_shapes(DrafterConfig("eagle3", "", shape=self.checkpoint_shape(range(self.num_taps))))

    def checkpoint_shape(self, tap_layers: Iterable[int]) -> dict[str, Any]:
        """What the ``shape`` of a checkpoint says of it."""
        shape = {**asdict(self), "tap_layers": list(tap_layers)}
        del shape["num_taps"]
        return shape


def trained_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Tensors of a checkpoint without its id maps: the fused layer, then the rest, then layers above the fused one.

    Starting weights are drawn in this order. Another order would give every seed another start.
    """
    shapes = {k: size for k, size in parameter_shapes(config).items() if k not in ("d2t", "t2d")}
    order = sorted(shapes, key=lambda name: (not name.startswith(FUSED), name.startswith("layers.")))
    return {name: shapes[name] for name in order}


def fused_input(block: DifferentiableBlock, embedded: Tensor, state: Tensor) -> Tensor:
    """What attention of the fused layer reads: the normed embedding beside the normed state.

    Args:
        block: the fused layer.
        embedded: ``[texts, rows, target_hidden]``.
        state: ``[texts, rows, hidden]``.
    """
    return torch.cat([block.norm("input_layernorm", embedded), block.norm("hidden_norm", state)], dim=-1)
