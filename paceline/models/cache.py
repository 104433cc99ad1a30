"""Where converted models are stored on this machine, and from a name or path to a directory.

Responsible for: the cache location and finding models in it. It never downloads. Called by process entry
points, the command line and `fetch.py`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from paceline.models.registry import MODELS, ModelError, UnknownModelError

CACHE_VARIABLE = "PACELINE_CACHE"


class NotFetchedError(ModelError):
    """The model is in the registry, but not in the cache yet."""


def cache_dir() -> Path:
    """The cache root: `$PACELINE_CACHE`, else the platform's cache folder for this user."""
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "paceline"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "paceline"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"


def model_path(name: str) -> Path:
    """Where the converted model of this name is, or would be."""
    return cache_dir() / "models" / name


def is_model_dir(path: Path) -> bool:
    """Whether `path` contains a config and safetensors weights."""
    return (path / "config.json").is_file() and (
        (path / "model.safetensors").is_file() or (path / "model.safetensors.index.json").is_file()
    )


def cached(name: str) -> Path | None:
    """The converted model, or None if it was never fetched."""
    path = model_path(name)
    return path if is_model_dir(path) else None


def resolve(name_or_path: str | Path) -> Path:
    """The directory of a model given by registry name or by path.

    Args:
        name_or_path: a registry name, or a directory in the transformers layout.

    Raises:
        NotFetchedError: a known name that is not in the cache.
        UnknownModelError: neither a name nor a model directory.
    """
    text = str(name_or_path)
    if text in MODELS:
        found = cached(text)
        if found is None:
            raise NotFetchedError(f"{text} is not in the cache; run `paceline models fetch {text}`")
        return found
    path = Path(name_or_path).expanduser()
    if is_model_dir(path):
        return path
    raise UnknownModelError(
        f"{text!r} is neither a known model ({', '.join(MODELS)}) nor a directory with config.json "
        "and safetensors weights"
    )
