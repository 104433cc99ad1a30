"""The ways to run a target that are compared: dtype, executor and row buckets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.methods.drafter import Drafter
from paceline.methods.loading import drafter_tap, load_drafter
from paceline.target import TargetEngine
from paceline.target.executors.backend import ExecutorChoice, has_cpu_kernels

ROW_BUCKETS = (16, 32, 64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to run the target."""

    dtype: str
    executor: ExecutorChoice
    has_row_buckets: bool = False

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.dtype}, {self.executor}" + (", row buckets" if self.has_row_buckets else "")

    def load(self, model_dir: Path, drafter_dir: Path, num_threads: int) -> tuple[TargetEngine, Drafter]:
        """The target with the drafter's tap, and the drafter."""
        dtype = getattr(torch, self.dtype)
        tap = drafter_tap(drafter_dir)
        engine = TargetEngine.load(
            model_dir,
            dtype=dtype,
            executor=self.executor,
            taps=[] if tap is None else [tap],
            num_threads=num_threads,
            row_buckets=ROW_BUCKETS if self.has_row_buckets else (),
        )
        return engine, load_drafter(drafter_dir, model_dir, dtype=engine.dtype)


def configurations() -> list[Configuration]:
    """Those that run here: the native executor needs its kernels."""
    lean = [
        Configuration(dtype, "lean", has_row_buckets)
        for dtype in ("float32", "bfloat16")
        for has_row_buckets in (False, True)
    ]
    return [*lean, Configuration("bfloat16", "native")] if has_cpu_kernels() else lean
