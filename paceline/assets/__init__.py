"""Data files that ship with the library: prompts for tests, demos and benchmarks, and trained defaults.

Importing this loads no torch, so that the command line can name a drafter without it.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

SHIPPED_DRAFTERS = {"smollm2-135m": "smollm2-135m-eagle3"}
"""Drafters that come with the package, by the name of their target."""


def drafters_dir() -> Path:
    """Directory of the drafters that ship."""
    return Path(str(files("paceline.assets").joinpath("drafters")))


def shipped_drafter(model: str) -> Path | None:
    """Directory of the drafter that ships for a model; None where none does."""
    name = SHIPPED_DRAFTERS.get(model)
    return None if name is None else drafters_dir() / name
