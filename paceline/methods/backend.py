"""What draft layers run on: the CPU kernels where those take a layer, else torch operators.

This is the one place in the methods that knows of `paceline.cpu`. Without that package everything runs in torch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.draft_layer import DraftLayer, LayerWeights
from paceline.draft_layer.context import ContextWeights, ContextWriter, TorchContext
from paceline.draft_layer.torch_layer import TorchLayer
from paceline.model.device import Device
from paceline.target.executors.backend import has_cpu_package

RowMap = Callable[[Tensor], Tensor]
"""A packed linear map: `[n, in] -> [n, out]`."""


def make_layer(weights: LayerWeights, device: Device) -> DraftLayer:
    """A draft layer, packed for what runs it fastest."""
    if has_cpu_package():
        from paceline.cpu.draft_layer import NativeLayer, takes_layer

        if takes_layer(weights, device):
            return NativeLayer(weights)
    return TorchLayer(weights, device)


def make_block_layer(
    weights: LayerWeights, context: ContextWeights, device: Device
) -> tuple[DraftLayer, ContextWriter]:
    """A layer whose rows attend to context rows, and what writes those; both on the same backend."""
    if has_cpu_package():
        from paceline.cpu.context import NativeContext
        from paceline.cpu.draft_layer import NativeLayer, takes_layer

        if takes_layer(weights, device):
            return NativeLayer(weights), NativeContext(context)
    return TorchLayer(weights, device), TorchContext(context, device)


def pack_rows(weight: Tensor, bias: Tensor | None, device: Device, *, as_float: bool = False) -> RowMap:
    """A small head's linear map, `[out, in]`, whose rows do not depend on the rows beside them on the CPU kernels.

    Args:
        weight: in the type to compute in.
        bias: `[out]` or None.
        device: where it runs.
        as_float: give float32 as it was summed where the kernels run it. Rounded to bfloat16, neighbouring ranks of
            logits would tie.
    """
    if has_cpu_package():
        from paceline.cpu.linear import KernelLinear, takes_rows

        if takes_rows(weight.shape[1], device, weight.dtype):
            return KernelLinear(weight, bias, torch.float32 if as_float else weight.dtype)
    return device.pack(weight, bias)
