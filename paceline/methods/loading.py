"""From a checkpoint directory to a drafter, whatever its method.

Called by the verifier and drafter processes, by commands and by experiments.
"""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.assets import SHIPPED_DRAFTERS, shipped_drafter
from paceline.methods.checkpoint import ANY_TARGET, CheckpointError, DrafterConfig
from paceline.methods.drafter import Drafter
from paceline.methods.method import DrafterClass
from paceline.methods.registry import METHODS
from paceline.models import model_fingerprint
from paceline.target import Device, TapSpec


def drafter_tap(directory: str | Path) -> TapSpec | None:
    """The features that a checkpoint's drafter reads, with their projection; None where it reads tokens alone.

    Raises:
        CheckpointError: the checkpoint cannot be used.
    """
    path = Path(directory)
    config = DrafterConfig.read(path)
    return _drafter_class(config).read_tap(path, config)


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
    return _drafter_class(config).load(path, config, target, where, dtype or where.default_dtype())


def default_drafter(model: str) -> Path:
    """Directory of the drafter that ships for a model.

    Raises:
        CheckpointError: none does.
    """
    path = shipped_drafter(model)
    if path is None:
        raise CheckpointError(
            f"no drafter ships for {model!r}: name one (--drafter, or as an argument of `paceline evaluate`), or train "
            f"one with `paceline train`. Shipped: {', '.join(f'{v} for {k}' for k, v in SHIPPED_DRAFTERS.items())}"
        )
    return path


def _drafter_class(config: DrafterConfig) -> DrafterClass:
    try:
        method = METHODS[config.method]
    except KeyError:
        raise CheckpointError(f"method {config.method!r} is none of {', '.join(sorted(METHODS))}") from None
    return method.drafter_class()
