"""What a target runs on: which executor, and what exists for CPUs alone.

This is the one place below the methods that knows of `paceline.cpu`. Without that package everything runs in torch.
Imports of the package come late: it imports the protocols of this package.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from paceline.model.architecture import Architecture
from paceline.model.configuration import read_configuration, transformers_configuration
from paceline.model.device import Device
from paceline.model.weights import UnsupportedModelError
from paceline.target.executor import Executor
from paceline.target.executors.lean import LeanExecutor
from paceline.target.kv.cache import MakePool

ExecutorChoice = Literal["auto", "native", "lean", "generic"]
"""`native` runs on the CPU kernels, `lean` in torch, `generic` through transformers; `auto` takes the first that runs
the model."""

# Smaller models fit the caches, and remapping takes longer than it saves.
MIN_HUGE_PAGE_MODEL_BYTES = 64 << 20


def has_cpu_package() -> bool:
    """Whether `paceline.cpu` is installed; its kernels may still be missing."""
    return find_spec("paceline.cpu") is not None


def has_cpu_kernels() -> bool:
    """Whether the CPU kernels are built and run on this processor."""
    if not has_cpu_package():
        return False
    from paceline.cpu import kernels

    return kernels.load() is not None


def pool_for(device: Device) -> MakePool | None:
    """What commits a cache's memory before anything waits for it; None where the device commits memory at once."""
    if device.kind != "cpu" or not has_cpu_package():
        return None
    from paceline.cpu.memory_pool import MemoryPool

    return MemoryPool


def load_executor(
    choice: ExecutorChoice, path: Path, device: Device, dtype: torch.dtype, *, packed: bool
) -> Executor:
    """Choose an executor and load a model directory into it.

    Raises:
        UnsupportedModelError: no executor, or not the one that was chosen, runs the checkpoint exactly.
    """
    if choice not in ("auto", "native", "lean", "generic"):
        raise UnsupportedModelError(f"executor must be auto, native, lean or generic, not {choice!r}")
    config = transformers_configuration(path) if choice == "generic" else read_configuration(path)
    executor = _load(choice, config, path, device, dtype, packed)
    is_large = executor.num_bytes >= MIN_HUGE_PAGE_MODEL_BYTES
    if is_large and device.kind == "cpu" and has_cpu_package():
        from paceline.cpu.huge_pages import advise_huge_pages

        advise_huge_pages()
    return executor


def _load(
    choice: ExecutorChoice, config: Any, path: Path, device: Device, dtype: torch.dtype, packed: bool
) -> Executor:
    arch: Architecture | None = None
    if choice != "generic":
        try:
            arch = Architecture.from_config(config)
        except UnsupportedModelError:
            if choice != "auto":
                raise
    if arch is None:
        from paceline.target.executors.generic import (
            GenericExecutor,  # imports transformers' models, for seconds
        )

        return GenericExecutor(config, path, device, device.compute_dtype(dtype))
    if choice != "lean" and packed and has_cpu_package():
        from paceline.cpu.executor import NativeExecutor, runs_natively

        if runs_natively(arch, device, dtype):
            return NativeExecutor(config, path)
    if choice == "native":
        raise UnsupportedModelError(
            "the CPU kernels are not built, or do not run this model, dtype or unpacked weights: choose auto or lean"
        )
    return LeanExecutor(config, path, device, dtype, packed=packed)
