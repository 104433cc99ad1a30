"""Which deployments run on this machine: one small file for each `paceline up` of this user.

Responsible for: writing the file, removing it at the end, and reading those whose process still runs. Deliberately
does not know: what a deployment is made of. Written by ``paceline up``; read by ``paceline generate``, ``paceline
curves`` and ``paceline policy``.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from paceline.atomic_write import write_json

_MAX_BYTES = 4096
_CLOCK_TOLERANCE_S = 1.0


@dataclass(frozen=True, slots=True)
class Record:
    """A deployment that runs.

    Attributes:
        pid: process id of its `paceline up`.
        started_at: when that process started, in seconds since 1970; another process may get the same id later.
        model: name of its model's directory.
        placement: "plain", "colocated" or "separate".
        gateway: host:port for clients.
        scheduler: host:port of its scheduler.
    """

    pid: int
    started_at: float
    model: str
    placement: str
    gateway: str
    scheduler: str

    def __str__(self) -> str:
        return f"{self.model}, {self.placement}, process {self.pid}: gateway {self.gateway}, scheduler {self.scheduler}"


def records_dir() -> Path:
    """The folder of the files: this user's runtime folder, else one in the temporary folder."""
    root = os.environ.get("XDG_RUNTIME_DIR")
    return Path(root) / "paceline" if root else Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}"


@contextlib.contextmanager
def recorded(model: str, placement: str, gateway: str, scheduler: str) -> Iterator[None]:
    """Lists this process's deployment for as long as the block runs.

    A folder that cannot be written, or that belongs to another user, leaves the deployment unlisted.
    """
    folder = records_dir()
    path = folder / f"{os.getpid()}.json"
    started_at = psutil.Process().create_time()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_ours(folder):
            record = Record(os.getpid(), started_at, model, placement, gateway, scheduler)
            write_json(path, asdict(record), indent=None)
    except OSError:
        pass
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def running() -> list[Record]:
    """The deployments of this user whose `paceline up` runs now, by process id."""
    folder = records_dir()
    if not _is_ours(folder):
        return []
    found = [record for path in folder.glob("*.json") if (record := _read(path)) is not None]
    return sorted(
        (record for record in found if _runs(record)), key=lambda record: (record.pid, record.model)
    )


def _is_ours(folder: Path) -> bool:
    """Whether no other user can have written the files of a folder."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    is_private = not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and is_private


def _read(path: Path) -> Record | None:
    try:
        with path.open("rb") as file:
            value = json.loads(file.read(_MAX_BYTES))
        record = Record(**value)
        texts = (record.model, record.placement, record.gateway, record.scheduler)
        is_record = type(record.pid) is int and isinstance(record.started_at, float | int)
    except (OSError, ValueError, TypeError):
        return None  # of another version, or being removed
    return record if is_record and all(isinstance(text, str) for text in texts) else None


def _runs(record: Record) -> bool:
    try:
        started_at = psutil.Process(record.pid).create_time()
    except (psutil.Error, ValueError, OverflowError):
        return False
    return abs(started_at - record.started_at) < _CLOCK_TOLERANCE_S
