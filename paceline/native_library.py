"""Compiled libraries beside their C sources: where they are, how to open them, and whether they fit.

Both sets of kernels share this file, `paceline.cpu.kernels` and `paceline.sampling.kernels`. It does not know what a
library's functions are. `paceline doctor` asks only where the libraries are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import structlog

log = structlog.get_logger()

_other_folder: Path | None = None


def use_libraries_in(folder: Path) -> None:
    """Open libraries from this folder instead: tests of sanitizer builds call it before any load."""
    global _other_folder
    _other_folder = folder


def library_path(folder: Path, stem: str) -> Path | None:
    """Where a folder's compiled library is, or None."""
    for suffix in EXTENSION_SUFFIXES:
        path = (_other_folder or folder) / f"{stem}{suffix}"
        if path.is_file():
            return path
    return None


def open_library(folder: Path, stem: str, name: str) -> ctypes.CDLL | None:
    """The library, or None where it was not built or cannot be loaded; `name` appears in the warning."""
    path = library_path(folder, stem)
    if path is None:
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:  # no OpenMP runtime of that name, for example
        log.warning(f"{name}_not_loaded", error=str(error))
        return None


def check_build(
    library: ctypes.CDLL, name: str, built_as: Callable[[int], int], facts: Sequence[int]
) -> None:
    """Compare what a library says it was built as with what the package expects, and warn of newer sources.

    Raises:
        RuntimeError: it was built for another version of this package.
    """
    path = Path(library._name)
    if [built_as(which) for which in range(len(facts))] != list(facts):
        raise RuntimeError(
            f"{path.name} was built for another version of paceline: run `pip install --no-deps -e .` again"
        )
    if any(source.stat().st_mtime > path.stat().st_mtime for source in path.parent.glob("*.[ch]")):
        log.warning(f"{name}_older_than_their_sources", fix="pip install --no-deps -e .")
