"""The device seam: what differs between CPU and CUDA, and nothing else.

Responsible for parsing device strings, choosing a dtype, packing weights into the form whose product is
fastest on the device, and thread and core settings. It does not know models, caches or steps. Called by the
executors (`pack`), the engine (`Device`) and by process entry points (`configure_threads`).

On x86 CPUs a weight is reordered once into oneDNN's blocked layout; `docs/adr/0003-cpu-executor.md` has the
measurements. Where that operator is missing (Arm builds) and on CUDA the plain product is used.

OpenMP waits: a process should start with `GOMP_SPINCOUNT=10000` (`0` for one thread) in its environment. It is
read when the OpenMP runtime loads, so it cannot be set from here: process entry points set it before torch is
imported. Threads that spin without end beside another busy process on two cores ran 10 to 20 times slower;
threads that sleep at once (`OMP_WAIT_POLICY=passive`) made a step on two quiet cores a third longer.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.contract.errors import PacelineError

# oneDNN chooses a weight layout for an expected number of rows. Decoding and verification run 1..16.
PACKED_ROWS_HINT = 8


class UnknownDeviceError(PacelineError):
    """The device string cannot be parsed, or the machine has no such device."""

    status = "FAILED_PRECONDITION"
    reason = "UNKNOWN_DEVICE"


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


class RmsNorm:
    """Root-mean-square norm of rows with a weight, `[n, width] -> [n, width]`.

    On CPU torch composes `rms_norm` of nine operators (12 us a call on one row) while `layer_norm` is one kernel.
    A row beside its own negative has mean zero and the row's mean square as variance, so layer norm of the pair
    is the wanted norm (6 us). CUDA has a fused kernel of its own.
    """

    __slots__ = ("_eps", "_pair_shape", "_pair_weight", "_shape", "_signs", "_weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight  # [width]
        self._eps = eps
        self._shape = (weight.shape[0],)
        self._pair_shape = (2, weight.shape[0])
        self._pair_weight = torch.stack([weight, weight])
        self._signs = torch.tensor([[1.0], [-1.0]], dtype=weight.dtype, device=weight.device)

    def __call__(self, rows: Tensor) -> Tensor:
        if rows.device.type != "cpu":
            return torch.rms_norm(rows, self._shape, self._weight, self._eps)
        pair = torch.mul(rows.unsqueeze(1), self._signs)  # [n, 2, width]
        return torch.layer_norm(pair, self._pair_shape, self._pair_weight, None, self._eps).select(1, 0)


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


@dataclass(frozen=True, slots=True)
class Device:
    """A place to run: kind and index, always explicit, never an ambient default device."""

    kind: str
    index: int = 0

    @classmethod
    def parse(cls, text: str) -> Device:
        """Parse `"cpu"`, `"cuda"` or `"cuda:1"`.

        Raises:
            UnknownDeviceError: the text is malformed or the machine has no such device.
        """
        kind, _, index_text = text.strip().lower().partition(":")
        if kind not in ("cpu", "cuda") or (index_text and not index_text.isdecimal()):
            raise UnknownDeviceError(f"unknown device {text!r}: expected 'cpu', 'cuda' or 'cuda:N'")
        index = int(index_text or 0)
        if kind == "cpu" and index != 0:
            raise UnknownDeviceError(f"there is one CPU device, not {text!r}")
        if kind == "cuda" and index >= torch.cuda.device_count():
            raise UnknownDeviceError(f"{text!r}: this process sees {torch.cuda.device_count()} CUDA devices")
        return cls(kind, index)

    @property
    def torch_device(self) -> torch.device:
        """The torch device, with its index spelled out."""
        return torch.device("cpu") if self.kind == "cpu" else torch.device(self.kind, self.index)

    @property
    def name(self) -> str:
        """What the hardware calls itself; a key for stored cost curves."""
        if self.kind == "cuda":
            return torch.cuda.get_device_name(self.index)
        return f"cpu-{torch.backends.cpu.get_cpu_capability().lower()}-{torch.get_num_threads()}t"

    def default_dtype(self) -> torch.dtype:
        """bfloat16 where the hardware multiplies it natively, float32 elsewhere."""
        if self.kind == "cuda":
            with torch.cuda.device(self.index):
                return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
        native = (
            torch.ops.mkldnn._is_mkldnn_bf16_supported() if torch.backends.mkldnn.is_available() else False
        )
        return torch.bfloat16 if native else torch.float32

    def compute_dtype(self, weight_dtype: torch.dtype) -> torch.dtype:
        """Type of activations, features and cache for weights of this type: float32 for float16 on CPU."""
        return torch.float32 if self.kind == "cpu" and weight_dtype == torch.float16 else weight_dtype

    def pack(self, weight: Tensor, bias: Tensor | None = None, *, packed: bool = True) -> Linear:
        """Move a weight here in the layout that multiplies fastest.

        Args:
            weight: `[out_features, in_features]`, any device; its dtype decides the product, see `compute_dtype`.
            bias: `[out_features]` or None.
            packed: False keeps the plain layout (for comparisons).
        """
        if self.kind == "cpu":
            if weight.dtype == torch.float16:
                if packed and has_half_weight_linear():
                    return HalfWeightLinear(weight, bias)
                weight, bias = weight.float(), None if bias is None else bias.float()
            if packed and has_onednn_linear(weight.dtype):
                return OneDnnLinear(weight, bias)
            return PlainLinear(weight.contiguous(), bias)
        where = self.torch_device
        return PlainLinear(weight.to(where).contiguous(), None if bias is None else bias.to(where))


def configure_threads(num_threads: int | None = None, cores: Iterable[int] | None = None) -> int:
    """Give this process its cores and its torch thread count.

    Args:
        num_threads: torch intra-op threads; None means one per pinned core, or leaves torch's choice
            unpinned.
        cores: core ids to pin the process to; None leaves the affinity alone.

    Returns:
        The number of torch threads now in force.

    Raises:
        ValueError: no such cores, or fewer than one thread.
    """
    if cores is not None:
        wanted = set(cores)
        if not hasattr(os, "sched_setaffinity"):
            raise ValueError("this platform cannot pin a process to cores")
        if not wanted or not wanted <= set(range(os.cpu_count() or 1)):
            raise ValueError(f"cores {sorted(wanted)} are not on this machine ({os.cpu_count()} cores)")
        for thread_id in _thread_ids():
            os.sched_setaffinity(thread_id, wanted)
        num_threads = num_threads or len(wanted)
    if num_threads is not None:
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, not {num_threads}")
        torch.set_num_threads(num_threads)
    return torch.get_num_threads()


def _thread_ids() -> list[int]:
    """Ids of this process's threads: affinity is per thread and only new ones inherit it."""
    try:
        return [int(entry) for entry in os.listdir("/proc/self/task")]
    except FileNotFoundError:
        return [0]
