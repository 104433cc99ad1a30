"""Compiled libraries that lie beside their C sources: where they are, opening them, whether they fit.

Responsible for: what the two sets of kernels share. Deliberately does not know: what a library's functions are, torch.

Called by: `paceline.cpu.kernels` and `paceline.sampling.kernels`; `paceline doctor` only asks where they are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import structlog

log = structlog.get_logger()


def library_path(folder: Path, stem: str) -> Path | None:
    """Where a folder's compiled library is, or None."""
    for suffix in EXTENSION_SUFFIXES:
        path = folder / f"{stem}{suffix}"
        if path.is_file():
            return path
    return None


def open_library(folder: Path, stem: str, name: str) -> ctypes.CDLL | None:
    """The library, or None where it was not built or cannot be loaded; `name` stands in the warning."""
    path = library_path(folder, stem)
    if path is None:
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:  # no OpenMP runtime of that name, say
        log.warning(f"{name}_not_loaded", error=str(error))
        return None


def check_build(
    library: ctypes.CDLL, name: str, built_as: Callable[[int], int], facts: Sequence[int]
) -> None:
    """Compare what a library says it was built as, and warn of sources that are newer.

    Raises:
        RuntimeError: it was built for another version of this package.
    """
    path = Path(library._name)
    if [built_as(which) for which in range(len(facts))] != list(facts):
        raise RuntimeError(f"{path.name} was built for another version of paceline: install it again")
    if any(source.stat().st_mtime > path.stat().st_mtime for source in path.parent.glob("*.[ch]")):
        log.warning(f"{name}_older_than_their_sources", fix="pip install --no-deps -e .")
