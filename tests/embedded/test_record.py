"""Files that say which deployments run: found while they do, and ignored when anything about them is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from paceline.embedded.record import Record, recorded, records_dir, running


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "paceline"


def a_record(pid: int, started_at: float) -> Record:
    return Record(pid, started_at, "tiny", "separate", "127.0.0.1:1", "127.0.0.1:2")


def test_a_deployment_is_listed_while_it_runs(own_folder: Path) -> None:
    assert running() == []
    with recorded("tiny", "separate", "127.0.0.1:1", "127.0.0.1:2"):
        (one,) = running()
        assert one == a_record(psutil.Process().pid, one.started_at)
        assert "tiny, separate" in str(one)
        assert own_folder.stat().st_mode & 0o777 == 0o700
    assert running() == []
    assert list(own_folder.iterdir()) == []


def test_a_process_that_has_ended_is_not_listed(own_folder: Path) -> None:
    own_folder.mkdir(mode=0o700)
    child = subprocess.Popen([sys.executable, "-c", ""])
    started_at = psutil.Process(child.pid).create_time()
    child.wait()
    for name, record in (
        ("ended", a_record(child.pid, started_at)),
        ("reused", a_record(psutil.Process().pid, 1.0)),
    ):
        (own_folder / f"{name}.json").write_text(json.dumps(asdict(record)))
    assert running() == []


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"pid": "1"}', "\x00", '{"pid": 1, "other": 2}', "x" * 10_000]
)
def test_a_file_of_another_kind_is_ignored(own_folder: Path, text: str) -> None:
    own_folder.mkdir(mode=0o700)
    (own_folder / "1.json").write_text(text)
    assert running() == []


def test_a_folder_that_others_may_write_is_not_believed(own_folder: Path) -> None:
    own_folder.mkdir()
    own_folder.chmod(0o777)
    with recorded("tiny", "separate", "127.0.0.1:1", "127.0.0.1:2"):
        assert list(own_folder.iterdir()) == []
        own = psutil.Process()
        (own_folder / "1.json").write_text(json.dumps(asdict(a_record(own.pid, own.create_time()))))
        assert running() == []


def test_a_folder_that_cannot_be_made_leaves_the_deployment_unlisted(own_folder: Path) -> None:
    own_folder.write_text("a file")
    with recorded("tiny", "separate", "127.0.0.1:1", "127.0.0.1:2"):
        assert running() == []
    assert records_dir() == own_folder
