"""A plain decoder block above a fused one: it normalises what comes from below, and adds to it.

Responsible for the block's tensors, named `layers.1.`, `layers.2.`, ... as public checkpoints name them, and its form
in torch operators. Knows no method; called by `eagle3_layer.py`. Its form on the CPU kernels is in `native_layer.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.methods.checkpoint import DrafterConfig
from paceline.methods.decoder_block import BlockWeights, DecoderBlock, block_shapes
from paceline.methods.draft_layer import Rows
from paceline.model.device import RmsNorm
from paceline.target import Device


def num_layers(config: DrafterConfig) -> int:
    """Blocks of a checkpoint, the fused one included; one where nothing is said."""
    return config.size("num_layers") if "num_layers" in config.shape else 1


def upper_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Tensors of all plain blocks by name."""
    d = config.size("hidden")
    shapes: dict[str, tuple[int, ...]] = {}
    for index in range(1, num_layers(config)):
        shapes |= {
            f"layers.{index}.input_layernorm.weight": (d,),
            **block_shapes(config, f"layers.{index}.", d),
        }
    return shapes


@dataclass(frozen=True, slots=True)
class UpperWeights:
    """A plain block, not yet packed.

    Attributes:
        norm: `[hidden]`, of what attention reads.
        block: attention and gated product.
    """

    norm: Tensor
    block: BlockWeights

    @classmethod
    def read(
        cls,
        config: DrafterConfig,
        tensors: Mapping[str, Tensor],
        index: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> UpperWeights:
        """Block `index`, 1 for the first above the fused one."""
        prefix = f"layers.{index}."
        norm = tensors[prefix + "input_layernorm.weight"].to(dtype)
        return cls(norm, BlockWeights.read(config, tensors, prefix, dtype, device))


class UpperBlock:
    """The block in torch operators; arguments as of :class:`DecoderBlock`."""

    def __init__(self, weights: UpperWeights, device: Device, layer: int, is_last: bool) -> None:
        self._norm = RmsNorm(weights.norm.to(device.torch_device), weights.block.eps)
        self._block = DecoderBlock(weights.block, device, layer, is_last)

    def forward(self, state: Tensor, rows: Sequence[Rows]) -> Tensor:
        """Run rows `[n, hidden]` of several sequences, writing their keys and values; gives `[n, hidden]`."""
        return self._block.forward(self._norm(state), state, rows)
