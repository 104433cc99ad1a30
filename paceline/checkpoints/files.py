"""The files of a public checkpoint: its configuration, and exactly the tensors that it should hold.

Responsible for finding them, for checking names, shapes and types before a tensor is read, and for refusing pickles.
Knows no format. Called by the formats' modules.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.drafters.checkpoint import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
INDEX = "model.safetensors.index.json"


def read_json_config(directory: Path) -> dict[str, Any]:
    """The checkpoint's `config.json`.

    Raises:
        CheckpointError: there is none, or it is no JSON object.
    """
    try:
        content = json.loads((directory / "config.json").read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory.name!r} has no config.json: give the directory of a drafter's checkpoint"
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{directory.name!r}: config.json is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{directory.name!r}: config.json is not an object")
    return content


def read_tensors(directory: Path, required: Shapes, optional: Shapes | None = None) -> dict[str, Tensor]:
    """Read the checkpoint's tensors, which must be those that are expected and no others.

    Args:
        directory: of `*.safetensors` files.
        required: shapes by name.
        optional: shapes of tensors that may be absent.

    Raises:
        CheckpointError: naming every tensor that is missing, surplus or of another shape; no safetensors at all.
    """
    files = _files(directory)
    expected = {**required, **(optional or {})}
    problems: list[str] = []
    out: dict[str, Tensor] = {}
    try:
        found: dict[str, Path] = {}
        for path in files:
            with safe_open(path, framework="pt", device="cpu") as handle:
                for name in handle.keys():  # noqa: SIM118 - the handle is not a mapping
                    found[name] = path
                    if name not in expected:
                        continue
                    shape = tuple(handle.get_slice(name).get_shape())
                    if shape != tuple(expected[name]):
                        problems.append(f"{name} has shape {shape}, not {tuple(expected[name])}")
        problems += [f"{name} is missing" for name in sorted(set(required) - set(found))]
        problems += [f"{name} is surplus" for name in sorted(set(found) - set(expected))]
        if problems:
            raise CheckpointError(f"{directory.name!r}: " + "; ".join(problems))
        for path in files:
            with safe_open(path, framework="pt", device="cpu") as handle:
                out |= {name: handle.get_tensor(name) for name, at in found.items() if at == path}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{directory.name!r}: {error}") from None
    for name, tensor in out.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(
                f"{directory.name!r}: {name} holds values that are not numbers, as in checkpoints that were "
                "saved before all their weights were loaded"
            )
    return out


def tensor_names(directory: Path) -> set[str]:
    """Names of the checkpoint's tensors.

    Raises:
        CheckpointError: no safetensors at all, or a damaged file.
    """
    names: set[str] = set()
    try:
        for path in _files(directory):
            with safe_open(path, framework="pt", device="cpu") as handle:
                names |= set(handle.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{directory.name!r}: {error}") from None
    return names


def write_files(directory: Path, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write `model.safetensors` and then `config.json`, so that a directory with a configuration is whole."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    part = directory / "model.safetensors.part"
    save_file(weights, part, metadata={"format": "pt"})
    part.chmod(0o644)  # it was written as a private temporary file; others may serve it
    part.replace(directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(content, indent=2) + "\n")


def _files(directory: Path) -> list[Path]:
    index = directory / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise CheckpointError(f"{directory.name!r}: {INDEX} has no weight_map") from None
        for name in names:
            if not isinstance(name, str) or Path(name).name != name:
                raise CheckpointError(f"{directory.name!r}: {INDEX} names {name!r}, outside the directory")
            if not (directory / name).is_file():
                raise CheckpointError(f"{directory.name!r}: {INDEX} names {name}, which is not there")
        return [directory / name for name in names]
    if (directory / "model.safetensors").is_file():
        return [directory / "model.safetensors"]
    for pattern in PICKLES:
        for path in sorted(directory.glob(pattern)):
            raise CheckpointError(
                f"{directory.name!r} has {path.name}, a pickle, which can run code and is never opened here: "
                "convert it where you trust it, "
                f"`safetensors.torch.save_file(torch.load({path.name!r}, weights_only=True), 'model.safetensors')`, "
                "and leave the other file out"
            )
    raise CheckpointError(f"{directory.name!r} has no model.safetensors")
