"""Tensors of a public checkpoint directory: safetensors, in one file or in shards; pickled weights are refused."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.atomic_write import write_json
from paceline.methods.checkpoint import CheckpointError
from paceline.safetensors_io import write_weights

PICKLED = (".pt", ".bin", ".pth")


def read_public_config(directory: Path) -> dict[str, Any]:
    """A directory's `config.json`.

    Raises:
        CheckpointError: it is missing, or is not a JSON object.
    """
    try:
        content = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except OSError:
        raise CheckpointError(f"{directory.name!r} has no config.json") from None
    except ValueError as error:
        raise CheckpointError(f"{directory.name!r}: config.json is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{directory.name!r}: config.json is not a JSON object")
    return content


def read_tensors(directory: Path, file_names: Iterable[str] = (), prefix: str = "") -> dict[str, Tensor]:
    """All tensors of a directory, or those with a prefix.

    Args:
        directory: the checkpoint.
        file_names: single files to look for, before `model.safetensors` and its shards.
        prefix: of the wanted names.

    Raises:
        CheckpointError: there are no weights, they are damaged, or only pickled weights exist.
    """
    tensors: dict[str, Tensor] = {}
    for path in _files(directory, file_names):
        try:
            with safe_open(path, framework="pt", device="cpu") as handle:
                for name in handle.keys():  # noqa: SIM118 - the handle is not a mapping
                    if name.startswith(prefix):
                        tensors[name] = handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path.name!r} cannot be read: {error}") from None
    return tensors


def _files(directory: Path, file_names: Iterable[str]) -> list[Path]:
    for name in (*file_names, "model.safetensors"):
        if (directory / name).is_file():
            return [directory / name]
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index.name} is malformed: {error}") from None
        for name in names:
            if not isinstance(name, str) or Path(name).name != name:
                raise CheckpointError(f"shard {name!r} is outside the checkpoint")
        return [directory / name for name in names]
    pickled = sorted(path.name for path in directory.glob("*") if path.suffix in PICKLED)
    if pickled:
        raise CheckpointError(
            f"{pickled[0]} is a pickle, which can run code when it is read, and is refused. Convert it where you trust "
            f"it: safetensors.torch.save_file(torch.load({pickled[0]!r}, weights_only=True), "
            f"{Path(pickled[0]).with_suffix('.safetensors').name!r})"
        )
    raise CheckpointError(f"{directory.name!r} has no safetensors weights")


def write_tensors(
    directory: Path, file_name: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write weights, then `config.json`, so that a directory with a configuration is complete."""
    write_weights(directory / file_name, tensors)
    write_json(directory / "config.json", dict(config))


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Refuse weights with values that are not numbers.

    Raises:
        CheckpointError: naming the first such tensor.
    """
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(
                f"{name} holds values that are not numbers, as in checkpoints that were saved before all their weights "
                "were loaded"
            )


def check_names(found: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse missing, surplus and misshapen tensors.

    Raises:
        CheckpointError: naming all of them.
    """
    problems = [f"{name} is missing" for name in sorted(set(expected) - set(found))]
    problems += [f"{name} is surplus" for name in sorted(set(found) - set(expected))]
    for name in sorted(set(found) & set(expected)):
        shape = tuple(found[name].shape)
        if shape != tuple(expected[name]):
            problems.append(f"{name} has shape {shape}, not {tuple(expected[name])}")
    if problems:
        raise CheckpointError("; ".join(problems))
