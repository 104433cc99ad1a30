"""Tensors of a safetensors model directory, by name.

Finds the shard of a tensor and refuses anything but safetensors. It does not know what the tensors mean. Executors,
drafters and training read through it.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from paceline.contract.errors import PacelineError


class UnsupportedModelError(PacelineError):
    """The checkpoint asks for something that no executor can run exactly."""

    status = "FAILED_PRECONDITION"
    reason = "UNSUPPORTED_MODEL"


class SafetensorsDir:
    """Read access to `model.safetensors`, or to the shards its index names. A context manager."""

    def __init__(self, model_dir: Path) -> None:
        self._files: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        index = model_dir / "model.safetensors.index.json"
        if index.is_file():
            weight_map = json.loads(index.read_text())["weight_map"]
            for name, file_name in weight_map.items():
                if Path(file_name).name != file_name:
                    raise UnsupportedModelError(f"shard {file_name!r} is outside the model directory")
                self._files[name] = model_dir / file_name
        elif (model_dir / "model.safetensors").is_file():
            path = model_dir / "model.safetensors"
            for name in self._handle(path).keys():  # noqa: SIM118 - the handle is not a mapping
                self._files[name] = path
        else:
            raise UnsupportedModelError(f"no model.safetensors in {model_dir.name!r}")

    def _handle(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt", device="cpu").__enter__()
        return self._open[path]

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        """The tensor in `dtype`.

        Raises:
            UnsupportedModelError: the checkpoint has no such tensor.
        """
        if name not in self._files:
            raise UnsupportedModelError(f"the checkpoint has no tensor {name!r}")
        tensor: Tensor = self._handle(self._files[name]).get_tensor(name)
        return tensor.to(dtype)

    def __enter__(self) -> SafetensorsDir:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._open.values():
            handle.__exit__(None, None, None)
        self._open.clear()
