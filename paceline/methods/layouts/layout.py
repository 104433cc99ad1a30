"""A public layout of drafter checkpoints: how it is recognised, read and written.

Each method names the layouts that it has; `paceline.checkpoints` collects them. Knows no method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.methods.checkpoint import DrafterConfig, read_all_tensors, save_drafter
from paceline.methods.layouts.public_checkpoint import PublicCheckpoint
from paceline.methods.layouts.target_facts import TargetFacts

Checkpoint = tuple[DrafterConfig, dict[str, Tensor]]
"""Paceline's configuration of a drafter, and its tensors by name."""


def _load_flat(directory: Path, config: DrafterConfig) -> Checkpoint:
    return config, read_all_tensors(directory)


def _carry_nothing(source: Path, output: Path) -> None:
    """The layout has nothing beside the tensors."""


def _add_nothing(config: DrafterConfig, tensors: Mapping[str, Tensor], target_dir: Path) -> Checkpoint:
    """The layout holds nothing of the target."""
    return config, dict(tensors)


@dataclass(frozen=True, slots=True)
class Layout:
    """A public layout.

    Attributes:
        name: on the command line.
        recognises: whether a `config.json` is of this layout.
        read: from a public checkpoint to Paceline's configuration and tensors. It takes every key that it honours: the
            caller refuses the others.
        write: from Paceline's configuration and tensors to a public directory.
        complete: adds what the drafter shares with its target, for other programs that expect it in the checkpoint; the
            last argument is the target's directory.
        load: from a directory of Paceline's own, whose configuration was read, to what `write` takes.
        save: from what `read` gives to a directory of Paceline's own.
        carry: copies further files from the directory that was read to the one that was written, either way.
        precedence: of the layouts that recognise a directory, the one with the smallest precedence reads it. A layout
            whose mark other layouts may have too has a larger one.
    """

    name: str
    recognises: Callable[[Mapping[str, Any]], bool]
    read: Callable[[PublicCheckpoint, TargetFacts], Checkpoint]
    write: Callable[[Path, DrafterConfig, Mapping[str, Tensor]], None]
    complete: Callable[[DrafterConfig, Mapping[str, Tensor], Path], Checkpoint] = _add_nothing
    load: Callable[[Path, DrafterConfig], Checkpoint] = _load_flat
    save: Callable[[Path, DrafterConfig, Mapping[str, Tensor]], None] = save_drafter
    carry: Callable[[Path, Path], None] = _carry_nothing
    precedence: int = 0
