"""What a process computes on, as described to peers and people.

Responsible for: describing ``cpu`` through psutil and ``cuda[:index]`` through NVML, with a note where there is
no GPU. Deliberately does not know: torch. It works in processes that never load torch, and it never raises.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pynvml

from paceline.v1 import peer_pb2


def describe_device(device: str, environ: Mapping[str, str] | None = None) -> peer_pb2.DeviceInfo:
    """Describe ``cpu``, ``cuda`` or ``cuda:<index>``; never raises.

    Args:
        device: as given by --device. An index counts the devices visible to this process.
        environ: where CUDA_VISIBLE_DEVICES is read; the process environment by default.
    """
    kind, _, index = device.partition(":")
    if kind == "cuda":
        return _describe_cuda(device, index or "0", os.environ if environ is None else environ)
    memory = psutil.virtual_memory()
    note = "" if kind == "cpu" else f"device {device} is not known; the processor is described"
    return peer_pb2.DeviceInfo(
        device=device,
        name=cpu_name(),
        memory_total_bytes=memory.total,
        memory_used_bytes=memory.total - memory.available,
        utilization=psutil.cpu_percent(interval=None) / 100.0,
        note=note,
    )


@cache
def cpu_name() -> str:
    """The processor's product name."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    except OSError:  # not Linux, or hidden
        pass
    return platform.processor() or platform.machine() or "unknown processor"


def _describe_cuda(device: str, index: str, environ: Mapping[str, str]) -> peer_pb2.DeviceInfo:
    info = peer_pb2.DeviceInfo(device=device, utilization=-1.0)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        info.note = f"no GPU: NVML could not start: {error}"
        return info
    try:
        handle = _handle(index, environ)
        if handle is None:
            count = pynvml.nvmlDeviceGetCount()
            info.note = (
                f"no GPU {device} among the {count} of this machine that CUDA_VISIBLE_DEVICES lets through"
            )
            return info
        info.name = _text(pynvml.nvmlDeviceGetName(handle))
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        info.memory_total_bytes, info.memory_used_bytes = int(memory.total), int(memory.used)
        info.utilization = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0
    except pynvml.NVMLError as error:  # MIG slices have no utilization, for one
        info.note = f"NVML: {error}"
    finally:
        pynvml.nvmlShutdown()
    return info


def _handle(index: str, environ: Mapping[str, str]) -> Any | None:
    """The NVML handle of a visible device: NVML counts all in PCI order, CUDA only the visible ones."""
    if not index.isdigit():
        return None
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    name = index
    if visible is not None:
        names = [part.strip() for part in visible.split(",") if part.strip()]
        if int(index) >= len(names):
            return None
        name = names[int(index)]
    if name.isdigit():
        return (
            pynvml.nvmlDeviceGetHandleByIndex(int(name)) if int(name) < pynvml.nvmlDeviceGetCount() else None
        )
    return pynvml.nvmlDeviceGetHandleByUUID(name)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
