"""Linear maps of small heads on the CPU kernels: bfloat16 weights, and no row depends on the rows beside it.

One product is a program of its own. Logits come out in float32: rounded to bfloat16, as torch's product gives them,
neighbouring ranks would tie. `paceline.methods.backend` chooses this class.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.cpu import kernels
from paceline.cpu.operation import Epilogue
from paceline.cpu.packed_weight import PackedWeight
from paceline.cpu.program import Program
from paceline.model.device import Device


def takes_rows(width: int, device: Device, dtype: torch.dtype) -> bool:
    """Whether the kernels are here and take products with rows of this width."""
    is_suited = device.kind == "cpu" and dtype == torch.bfloat16 and width % 16 == 0
    return is_suited and kernels.load() is not None


class KernelLinear:
    """A weight `[out_features, in_features]` with an optional bias, in panels.

    Args:
        weight: bfloat16.
        bias: `[out_features]` or None.
        out_dtype: of the results: bfloat16, or float32 as they were summed.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16):
        self._out_features = weight.shape[0]
        self._out_dtype = out_dtype
        self._program = Program()
        self._rows = self._program.buffer(weight.shape[1], bound=True)
        self._out = self._program.buffer(self._out_features, bound=True)
        epilogue = Epilogue.STORE_FLOAT if out_dtype == torch.float32 else Epilogue.STORE
        self._program.linear(self._rows, self._out, PackedWeight.pack(weight, bias), epilogue)

    def __call__(self, rows: Tensor) -> Tensor:
        """bfloat16 `[n, in_features] -> [n, out_features]`."""
        out = torch.empty(rows.shape[0], self._out_features, dtype=self._out_dtype)
        self._program.run([], [0] * rows.shape[0], {self._rows: rows.contiguous(), self._out: out})
        return out
