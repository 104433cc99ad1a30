"""Packed weights: the forms of a matrix product on CPU and CUDA, and which of them this build of torch has.

On x86 CPUs a weight is reordered once into oneDNN's blocked layout; `docs/adr/0003-cpu-executor.md` has the
measurements. Where that operator is missing (Arm builds) and on CUDA the plain product is used. `Device.pack` chooses.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# oneDNN chooses a weight layout for an expected number of rows. Decoding and verification run 1..16.
PACKED_ROWS_HINT = 8


class Linear(Protocol):
    """A packed weight `[out_features, in_features]` with an optional bias."""

    def __call__(self, rows: Tensor) -> Tensor:
        """`[n, in_features] -> [n, out_features]`."""

    def add(self, rows: Tensor, residual: Tensor) -> Tensor:
        """`residual + self(rows)` as a new tensor; fused where the device can."""

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory the weight holds."""


class PlainLinear:
    """`F.linear` on the weight as it is. Works everywhere; the reference for the packed form."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight  # [out_features, in_features]
        self._bias = bias  # [out_features]

    def __call__(self, rows: Tensor) -> Tensor:
        return F.linear(rows, self._weight, self._bias)

    def add(self, rows: Tensor, residual: Tensor) -> Tensor:
        if self._bias is None:
            return torch.addmm(residual, rows, self._weight.t())
        return F.linear(rows, self._weight, self._bias).add_(residual)

    @property
    def num_bytes(self) -> int:
        return self._weight.numel() * self._weight.element_size()


def _direct(overload: Any) -> Any:
    """The function behind an operator overload: the Python layer above it costs up to 5 us a call."""
    return getattr(overload, "_op", overload)


class OneDnnLinear:
    """A weight in oneDNN's blocked layout, with the residual add fused into the product."""

    __slots__ = ("_bias", "_num_bytes", "_op", "_op_binary", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._num_bytes = weight.numel() * weight.element_size()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_ROWS_HINT)
        self._bias = None if bias is None else bias.contiguous()
        self._op = _direct(torch.ops.mkldnn._linear_pointwise.default)
        self._op_binary = _direct(torch.ops.mkldnn._linear_pointwise.binary)

    def __call__(self, rows: Tensor) -> Tensor:
        out: Tensor = self._op(rows, self._weight, self._bias, "none", [], "")
        return out

    def add(self, rows: Tensor, residual: Tensor) -> Tensor:
        out: Tensor = self._op_binary(rows, residual, self._weight, self._bias, "add")
        return out

    @property
    def num_bytes(self) -> int:
        return self._num_bytes


class HalfWeightLinear:
    """float16 weights times float32 rows, accumulated in float32 (FBGEMM, x86 only).

    Reads half the bytes of float32 and rounds only the weights. Each row is computed alike however many rows run
    beside it, bit for bit, so a verified row equals a decoded one.
    """

    __slots__ = ("_num_bytes", "_op", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._num_bytes = weight.numel() * torch.float16.itemsize
        self._weight = torch.ops.quantized.linear_prepack_fp16(
            weight.float().contiguous(), None if bias is None else bias.float().contiguous()
        )
        self._op = _direct(torch.ops.quantized.linear_dynamic_fp16.default)

    def __call__(self, rows: Tensor) -> Tensor:
        out: Tensor = self._op(rows, self._weight)
        return out

    def add(self, rows: Tensor, residual: Tensor) -> Tensor:
        out: Tensor = self._op(rows, self._weight)
        return out.add_(residual)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes


@cache
def has_onednn_linear(dtype: torch.dtype) -> bool:
    """Whether this build packs and multiplies `dtype` weights, found by running a small product."""
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    try:
        with torch.inference_mode():
            weight = torch.eye(32, dtype=dtype)
            rows = torch.arange(64, dtype=dtype).view(2, 32)
            packed = OneDnnLinear(weight)
            return bool(torch.equal(packed(rows), rows)) and bool(
                torch.equal(packed.add(rows, rows), rows + rows)
            )
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


@cache
def has_half_weight_linear() -> bool:
    """Whether this build multiplies float16 weights with float32 rows, found by running a small product."""
    try:
        with torch.inference_mode():
            rows = torch.arange(64, dtype=torch.float32).view(2, 32)
            packed = HalfWeightLinear(torch.eye(32))
            return bool(torch.equal(packed(rows), rows)) and bool(
                torch.equal(packed.add(rows, rows), rows + rows)
            )
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
