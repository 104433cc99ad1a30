"""A public checkpoint's directory: its configuration, every key of which is accounted for, and its tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from paceline.methods.layouts.public_config import PublicConfig
from paceline.methods.layouts.tensor_files import read_public_config, read_tensors


@dataclass(frozen=True, slots=True)
class PublicCheckpoint:
    """What the reader of a layout is given.

    Attributes:
        directory: for further files.
        config: its `config.json`; the reader takes the keys that it honours.
    """

    directory: Path
    config: PublicConfig

    @classmethod
    def open(cls, directory: Path, ignored: Collection[str] = ()) -> PublicCheckpoint:
        """Read the configuration of a directory.

        Args:
            directory: the checkpoint.
            ignored: full names of keys that the user declares to be without effect.

        Raises:
            CheckpointError: there is none, or it is not a JSON object.
        """
        return cls(directory, PublicConfig(read_public_config(directory), ignored=ignored))

    @property
    def name(self) -> str:
        """The directory's name, for messages."""
        return self.directory.name

    def tensors(self, file_names: Iterable[str] = (), prefix: str = "") -> dict[str, Tensor]:
        """Its tensors; see `tensor_files.read_tensors`."""
        return read_tensors(self.directory, file_names, prefix)
