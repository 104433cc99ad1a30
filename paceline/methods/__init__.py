"""Drafting methods, one file each, and how a checkpoint finds its method."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.assets import shipped_drafter
from paceline.methods.base import (
    Drafter,
    DrafterError,
    DraftRequest,
    OutcomeRequest,
    ReadsInPlace,
    UnknownDraftSequenceError,
    may_rank,
)
from paceline.methods.checkpoint import ANY_TARGET, CheckpointError, DrafterConfig
from paceline.methods.deepseek_mtp.drafter import DeepseekMtpDrafter
from paceline.methods.dflash.drafter import DFlashDrafter
from paceline.methods.dspark.drafter import DSparkDrafter
from paceline.methods.eagle1.drafter import Eagle1Drafter
from paceline.methods.eagle2.drafter import Eagle2Drafter
from paceline.methods.eagle3.drafter import Eagle3Drafter
from paceline.methods.gemma4_mtp.drafter import Gemma4MtpDrafter
from paceline.methods.independent.drafter import IndependentDrafter
from paceline.methods.medusa1.drafter import Medusa1Drafter
from paceline.methods.medusa2.drafter import Medusa2Drafter
from paceline.methods.method import DrafterClass
from paceline.methods.p_eagle.drafter import PEagleDrafter
from paceline.methods.pard1.drafter import Pard1Drafter
from paceline.methods.pard2.drafter import Pard2Drafter
from paceline.models import model_fingerprint
from paceline.target import Device, TapSpec

METHODS: dict[str, DrafterClass] = {
    DeepseekMtpDrafter.method: DeepseekMtpDrafter,
    DFlashDrafter.method: DFlashDrafter,
    DSparkDrafter.method: DSparkDrafter,
    Eagle1Drafter.method: Eagle1Drafter,
    Eagle2Drafter.method: Eagle2Drafter,
    Eagle3Drafter.method: Eagle3Drafter,
    Gemma4MtpDrafter.method: Gemma4MtpDrafter,
    IndependentDrafter.method: IndependentDrafter,
    Medusa1Drafter.method: Medusa1Drafter,
    Medusa2Drafter.method: Medusa2Drafter,
    PEagleDrafter.method: PEagleDrafter,
    Pard1Drafter.method: Pard1Drafter,
    Pard2Drafter.method: Pard2Drafter,
}


def _method(config: DrafterConfig) -> DrafterClass:
    try:
        return METHODS[config.method]
    except KeyError:
        raise CheckpointError(f"method {config.method!r} is none of {', '.join(sorted(METHODS))}") from None


def drafter_tap(directory: str | Path) -> TapSpec | None:
    """The features that a checkpoint's drafter reads, with their projection; None where it reads tokens alone.

    Raises:
        CheckpointError: the checkpoint cannot be used.
    """
    path = Path(directory)
    config = DrafterConfig.read(path)
    return _method(config).read_tap(path, config)


def load_drafter(
    directory: str | Path,
    target_dir: str | Path,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
) -> Drafter:
    """Load a drafter for a target.

    Args:
        directory: the drafter's checkpoint.
        target_dir: the target's directory; embeddings that a method shares are read from it.
        device: "cpu", "cuda:1", ...
        dtype: compute dtype; None chooses what the device multiplies natively.

    Raises:
        CheckpointError: the checkpoint is unusable, or was made for another target.
    """
    path, target = Path(directory), Path(target_dir)
    config = DrafterConfig.read(path)
    found = model_fingerprint(target)
    if config.target_fingerprint not in (found, ANY_TARGET):
        raise CheckpointError(
            f"drafter {path.name!r} was made for target {config.target_name or config.target_fingerprint[:12]!r}, "
            f"not for {target.name!r} ({found[:12]}): train one for it with `paceline train {config.method}`"
        )
    where = Device.parse(device)
    return _method(config).load(path, config, target, where, dtype or where.default_dtype())


def default_drafter(model: str) -> Path:
    """Directory of the drafter that ships for a model.

    Raises:
        CheckpointError: none does.
    """
    path = shipped_drafter(model)
    if path is None:
        raise CheckpointError(
            f"no drafter ships for {model!r}: give one, or train one with `paceline train eagle3`"
        )
    return path


__all__ = [
    "METHODS",
    "CheckpointError",
    "DraftRequest",
    "Drafter",
    "DrafterClass",
    "DrafterConfig",
    "DrafterError",
    "OutcomeRequest",
    "ReadsInPlace",
    "UnknownDraftSequenceError",
    "default_drafter",
    "drafter_tap",
    "load_drafter",
    "may_rank",
]
