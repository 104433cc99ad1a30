"""Which drafters are measured with which targets.

Responsible for names that tell drafters apart, and for a drafter's target: the one it was made for, by fingerprint, or,
where it was made for none in particular, every one but itself. Deliberately does not know: whether it loads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.methods.checkpoint import ANY_TARGET, CheckpointError, DrafterConfig
from paceline.models import model_fingerprint


@dataclass(frozen=True, slots=True)
class Entry:
    """A drafter for a target.

    Attributes:
        name: of its directory, with the one above it where several have the same.
        fingerprint: of all its weights and configurations.
        suits_any: whether it was made for no target in particular, so that it may not suit this one.
    """

    name: str
    directory: Path
    fingerprint: str
    suits_any: bool


def pair(drafters: Sequence[Path], models: Sequence[Path]) -> dict[Path, list[Entry]]:
    """The drafters of each target, in the order given.

    Raises:
        CheckpointError: one was made for a target that is not among them.
    """
    by_fingerprint = {model_fingerprint(model): model for model in models}
    pairs: dict[Path, list[Entry]] = {model: [] for model in by_fingerprint.values()}
    for directory in drafters:
        config, weights = DrafterConfig.read(directory), _weights(directory)
        fingerprint = hashlib.sha256("".join(weights).encode()).hexdigest()
        entry = Entry(
            _name(directory, drafters), directory, fingerprint, config.target_fingerprint == ANY_TARGET
        )
        if entry.suits_any:
            fitting = [model for mark, model in by_fingerprint.items() if mark not in weights]
        else:
            fitting = [model for mark, model in by_fingerprint.items() if mark == config.target_fingerprint]
        if not fitting:
            names = ", ".join(model.name for model in models)
            made_for = config.target_name or config.target_fingerprint[:12]
            raise CheckpointError(
                f"drafter {directory.name!r} was made for target {made_for!r}, which is not among {names}: name it "
                "with --model"
                if not entry.suits_any
                else f"{directory.name!r} is the target itself: name another one with --model"
            )
        for model in fitting:
            pairs[model].append(entry)
    return pairs


def _name(directory: Path, all_directories: Sequence[Path]) -> str:
    same = [other for other in all_directories if other.name == directory.name]
    return directory.name if len(same) == 1 else f"{directory.absolute().parent.name}/{directory.name}"


def _weights(directory: Path) -> list[str]:
    """Fingerprints of a checkpoint's folders with weights: its own, and a model's inside it."""
    folders = {file.parent for file in directory.rglob("*.safetensors")}
    return [model_fingerprint(folder) for folder in sorted(folders)]
