"""Files that a reader finds whole, or not at all.

Responsible for the one way in which files are written that others may read: beside their place and then moved, so that
who reads meanwhile, or after the writer was killed, finds the old file or the new one. Deliberately does not know: what
is in them. Called by whoever exports, reports, or tells other processes something by a file.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A place beside ``path`` to write to; it takes the place of ``path`` at the end, or is gone after an error.

    The directory is made. A writer that is killed leaves ``NAME.part``, which the next one writes over. What is no
    file, such as a pipe, is written to as it is.
    """
    path = path.resolve()  # a link stays one
    if path.exists() and not path.is_file():
        yield path
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write text as UTF-8, in place of what is there."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any, **options: Any) -> None:
    """Write JSON for people to read as well, in place of what is there.

    Args:
        path: where to.
        value: of plain values.
        options: of :func:`json.dumps` beside an indent of two.
    """
    write_text(path, json.dumps(value, **{"indent": 2, **options}) + "\n")


def copy_file(source: Path, path: Path) -> None:
    """Copy a file's content, in place of what is there."""
    with replacing(path) as part:
        shutil.copyfile(source, part)
