"""What a drafting method is before any checkpoint is loaded: its name, its layouts, what it reads and how it loads.

Responsible for: the seam that `METHODS` is a table of; a drafter's class is such a method. Deliberately does not know:
any of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from paceline.methods.base import Drafter
from paceline.methods.checkpoint import DrafterConfig
from paceline.target import Device, TapSpec

PLACEMENTS = ("colocated", "separate")
"""Where a drafter may run. Placement is a value and not a code path, so this holds for every class of `METHODS`."""


class DrafterClass(Protocol):
    """A class of drafters."""

    @property
    def method(self) -> str:
        """Name of the method, as checkpoints give it."""

    @property
    def formats(self) -> tuple[str, ...]:
        """Layouts its checkpoints load from and save to, such as "paceline" and "transformers"."""

    @property
    def reads(self) -> str:
        """What it reads of the target, in words."""

    def read_tap(self, directory: Path, config: DrafterConfig) -> TapSpec | None:
        """The features that a checkpoint's drafter reads, with their projection; None where it reads tokens alone.

        Raises:
            CheckpointError: the checkpoint cannot be used.
        """

    def load(
        self, directory: Path, config: DrafterConfig, target_dir: Path, device: Device, dtype: torch.dtype
    ) -> Drafter:
        """Load a checkpoint for a target.

        Raises:
            CheckpointError: the checkpoint cannot be used.
        """
