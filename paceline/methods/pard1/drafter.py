"""PARD (2504.18583): mask tokens drafted from the target's tokens alone (`paceline.methods.pard.drafter`)."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import structlog
import torch

from paceline.methods.checkpoint import DrafterConfig
from paceline.methods.pard.checkpoint import read_model_config
from paceline.methods.pard.drafter import PardDrafter, load_model
from paceline.methods.whole_model.draft_model import model_directory
from paceline.target import Device, TapSpec

log = structlog.get_logger()


class Pard1Drafter(PardDrafter):
    """Drafts with mask tokens, without features; see `paceline.methods.drafter.Drafter`."""

    method: ClassVar[str] = "pard1"

    @classmethod
    def read_tap(cls, directory: Path, config: DrafterConfig) -> TapSpec | None:
        """None: it reads no features."""
        return None

    @classmethod
    def load(
        cls, directory: Path, config: DrafterConfig, target_dir: Path, device: Device, dtype: torch.dtype
    ) -> Pard1Drafter:
        """Load a checkpoint, Paceline's own or a public directory with `pard_token` in its `config.json`."""
        if read_model_config(model_directory(directory)).get("pard2"):
            log.warning(
                "this PARD-2 checkpoint drafts without the target's features: "
                "`paceline checkpoints import` makes one that reads them",
                drafter=directory.name,
            )
        return cls(*load_model(directory, config, target_dir, device, dtype))
