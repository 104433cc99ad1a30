"""The device seam: what differs between CPU and CUDA, and nothing else.

A device parses its name, chooses a dtype and packs weights into the form whose product is fastest on it. It does not
know models, caches or steps. Executors call `pack`, process entry points call `configure_threads`.

OpenMP waits: a process should start with `GOMP_SPINCOUNT=10000` (`0` for one thread) in its environment. The OpenMP
runtime reads the variable when it loads, so process entry points set it before they import torch. Threads that spin
without end beside another busy process on two cores ran 10 to 20 times slower. Threads that sleep at once
(`OMP_WAIT_POLICY=passive`) made a step on two quiet cores a third longer.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.contract.errors import PacelineError
from paceline.model.linear import (
    HalfWeightLinear,
    Linear,
    OneDnnLinear,
    PlainLinear,
    has_half_weight_linear,
    has_onednn_linear,
)


class UnknownDeviceError(PacelineError):
    """The device string cannot be parsed, or the machine has no such device."""

    status = "FAILED_PRECONDITION"
    reason = "UNKNOWN_DEVICE"


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
