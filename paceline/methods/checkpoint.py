"""Drafter checkpoints in Paceline's own layout: a directory with `config.json` and `model.safetensors`.

Tensors have the names of the method's public layout, so a converter renames only what differs. Nothing is unpickled,
and no code is loaded. Training writes it, and `paceline.methods.loading.load_drafter` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from paceline.atomic_write import write_json
from paceline.contract.errors import IncompatiblePeerError
from paceline.safetensors_io import write_weights

FORMAT_VERSION = 1

ANY_TARGET = "*"
"""In place of the target's fingerprint: the drafter fits every target with its tokenizer."""


class CheckpointError(IncompatiblePeerError):
    """A drafter checkpoint that cannot be used; the message says why."""

    reason = "BAD_CHECKPOINT"


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Content of a drafter's `config.json`.

    Attributes:
        method: name of the method in `paceline.methods.registry.METHODS`.
        target_fingerprint: `paceline.models.model_fingerprint` of the target it was made for, or `ANY_TARGET`.
        target_name: the target's name for people.
        shape: the method's own sizes.
        training: how it was made, for people: command, seed, measurements.
    """

    method: str
    target_fingerprint: str
    target_name: str = ""
    shape: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    @classmethod
    def read(cls, directory: Path) -> DrafterConfig:
        """Read a checkpoint's configuration.

        A causal language model that transformers saved is an independent drafter for any target. If it names a
        `pard_token`, it drafts by mask tokens.

        Raises:
            CheckpointError: there is no configuration, or it is not one of a drafter.
        """
        path = directory / "config.json"
        try:
            content = json.loads(path.read_text())
        except FileNotFoundError:
            raise CheckpointError(
                f"{directory.name!r} has no config.json: it is not a drafter checkpoint"
            ) from None
        except ValueError as error:
            raise CheckpointError(f"{directory.name!r}: config.json is not JSON: {error}") from None
        if isinstance(content, dict) and "model_type" in content and "method" not in content:
            return cls._of_transformers(directory.name, content)
        if not isinstance(content, dict) or content.get("format_version") != FORMAT_VERSION:
            raise CheckpointError(f"{directory.name!r}: format_version must be {FORMAT_VERSION}")
        known = cls.__dataclass_fields__
        if unknown := sorted(set(content) - set(known)):
            raise CheckpointError(f"{directory.name!r}: unknown fields {unknown} in config.json")
        try:
            config = cls(**content)
        except TypeError as error:
            raise CheckpointError(f"{directory.name!r}: {error}") from None
        for name in ("method", "target_fingerprint", "target_name"):
            if not isinstance(getattr(config, name), str):
                raise CheckpointError(f"{directory.name!r}: {name} must be a text")
        for name in ("shape", "training"):
            if not isinstance(getattr(config, name), dict):
                raise CheckpointError(f"{directory.name!r}: {name} must be an object")
        return config

    @classmethod
    def _of_transformers(cls, name: str, content: Mapping[str, Any]) -> DrafterConfig:
        architectures = content.get("architectures") or []
        if not any(str(architecture).endswith("ForCausalLM") for architecture in architectures):
            raise CheckpointError(
                f"{name!r} holds {architectures or content['model_type']!r}, which is no causal language model"
            )
        if content["model_type"] == "gemma4_assistant":
            raise CheckpointError(
                f"{name!r} reads layers of its target: make it Paceline's with `paceline checkpoints import`"
            )
        if "pard_token" in content:
            return cls("pard1", ANY_TARGET, shape={"mask_token": content["pard_token"]})
        return cls("independent", ANY_TARGET)

    def size(self, name: str) -> int:
        """A size of the method's shape, checked to be a positive whole number."""
        value = self.shape.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"shape.{name} must be a positive whole number, not {value!r}")
        return value

    def flag(self, name: str) -> bool:
        """A switch of the method's shape; off if it is absent."""
        value = self.shape.get(name, False)
        if not isinstance(value, bool):
            raise CheckpointError(f"shape.{name} must be true or false, not {value!r}")
        return value

    def tap_layers(self) -> tuple[int, ...]:
        """Target layers whose incoming streams are read.

        Raises:
            CheckpointError: `shape.tap_layers` does not list layers.
        """
        layers = self.shape.get("tap_layers")
        if (
            not isinstance(layers, list)
            or not layers
            or not all(isinstance(i, int) and i >= 0 for i in layers)
        ):
            raise CheckpointError(
                "shape.tap_layers must list the target layers whose incoming streams are read"
            )
        return tuple(layers)


def save_drafter(directory: Path, config: DrafterConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint: first the weights, so that a directory with a configuration is complete."""
    write_weights(directory / "model.safetensors", tensors)
    write_json(directory / "config.json", asdict(config))


def load_tensors(directory: Path, expected: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Read exactly the expected tensors.

    Raises:
        CheckpointError: naming every tensor that is missing, surplus or of another shape.
    """
    path = directory / "model.safetensors"
    if not path.is_file():
        raise CheckpointError(f"{directory.name!r} has no model.safetensors")
    with safe_open(path, framework="pt", device="cpu") as handle:
        names = set(handle.keys())
        problems = [f"{name} is missing" for name in sorted(set(expected) - names)]
        problems += [f"{name} is surplus" for name in sorted(names - set(expected))]
        for name in sorted(names & set(expected)):
            shape = tuple(handle.get_slice(name).get_shape())
            if shape != tuple(expected[name]):
                problems.append(f"{name} has shape {shape}, not {tuple(expected[name])}")
        if problems:
            raise CheckpointError(f"{directory.name!r}: " + "; ".join(problems))
        return {name: handle.get_tensor(name) for name in expected}


def read_all_tensors(directory: Path) -> dict[str, Tensor]:
    """Read all tensors, unchecked: converters check them against the layout that they write.

    Raises:
        CheckpointError: there is no `model.safetensors`.
    """
    path = directory / "model.safetensors"
    if not path.is_file():
        raise CheckpointError(f"{directory.name!r} has no model.safetensors")
    with safe_open(path, framework="pt", device="cpu") as handle:
        return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 - not a mapping


def load_tensor(directory: Path, name: str) -> Tensor:
    """Read one tensor.

    Raises:
        CheckpointError: the file or the tensor is missing.
    """
    path = directory / "model.safetensors"
    if not path.is_file():
        raise CheckpointError(f"{directory.name!r} has no model.safetensors")
    with safe_open(path, framework="pt", device="cpu") as handle:
        if name not in set(handle.keys()):
            raise CheckpointError(f"{directory.name!r}: {name} is missing")
        tensor: Tensor = handle.get_tensor(name)
        return tensor
