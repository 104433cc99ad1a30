"""Whatever is written for others to read is whole: after an error, after a kill, and for who reads meanwhile."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import paceline
from paceline.atomic_write import copy_file, replacing, write_json, write_text

ROOT = Path(paceline.__file__).parent.parent

# Ends the process where a file that was written would take its place.
KILLED = """
import os, pathlib, signal, sys
from pathlib import Path
place, name = Path(sys.argv[1]), sys.argv[2]
replace = pathlib.Path.replace
def replace_or_die(self, target):
    if Path(target).name == name:
        os.kill(os.getpid(), signal.SIGKILL)
    return replace(self, target)
pathlib.Path.replace = replace_or_die
"""


def killed(program: str, place: Path, name: str) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED + program, str(place), name], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    "writes",
    [
        "write_json(place / name, [0] * 9999)",
        "write_text(place / name, 'x')",
        "copy_file(Path(os.__file__), place / name)",
    ],
)
def test_a_killed_writer_leaves_the_old_file(tmp_path: Path, writes: str) -> None:
    write_json(tmp_path / "report.json", {"old": True})
    killed(f"from paceline.atomic_write import *\n{writes}", tmp_path, "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == {"old": True}
    write_json(tmp_path / "report.json", {"old": False})
    assert json.loads((tmp_path / "report.json").read_text()) == {"old": False}
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_an_export_killed_before_its_configuration_is_none(tmp_path: Path) -> None:
    """The weights are there already; by the configuration a directory is known to be whole."""
    program = """
import torch
from paceline.methods.checkpoint import DrafterConfig, save_drafter
save_drafter(place, DrafterConfig("eagle3", "ff", "tiny", {"hidden": 8}), {"w": torch.zeros(4)})
"""
    killed(program, tmp_path, "config.json")
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors", "config.json.part"}


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "old")
    part = replacing(tmp_path / "a")
    part.__enter__().write_text("half")
    assert not part.__exit__(OSError, OSError("disk full"), None)
    with pytest.raises(TypeError):
        write_json(tmp_path / "a", object())
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "old")]


def test_a_reader_finds_one_or_the_other(tmp_path: Path) -> None:
    path, values = tmp_path / "a.json", [[0] * 50_000, [1] * 60_000]
    write_json(path, values[0])
    writer = threading.Thread(target=lambda: [write_json(path, values[which % 2]) for which in range(20)])
    writer.start()
    while writer.is_alive():
        assert json.loads(path.read_text()) in values
    writer.join()


def test_links_and_pipes_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real" / "a")
    copy_file(Path(__file__), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "a").read_bytes() == Path(__file__).read_bytes()
    os.mkfifo(tmp_path / "pipe")
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_text(tmp_path / "pipe", "through")
    reader.join(10)
    assert found == ["through"]
    assert (tmp_path / "pipe").is_fifo()


# Into a directory that is moved to its place as a whole.
WRITES_BESIDE = {
    f"paceline/{name}.py" for name in ("models/fetch", "training/run_state", "methods/medusa2/tuned_backbone")
}


def test_nothing_is_written_in_place() -> None:
    """No module but `atomic_write` writes a text, dumps into a stream or copies a file by itself."""
    found = set()
    for package in ("paceline", "services", "orchestrator"):
        for path in (ROOT / package).rglob("*.py"):
            calls = {
                node.func.attr
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            }
            if calls & {"write_text", "write_bytes", "dump", "copyfile", "copy2"}:
                found.add(str(path.relative_to(ROOT)))
    assert found == WRITES_BESIDE | {"paceline/atomic_write.py"}
