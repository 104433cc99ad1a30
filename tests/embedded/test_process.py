"""Child processes: readiness, logs, an end in order, and none that outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import paceline
from paceline.embedded.process import ChildProcess, last_lines

ROOT = Path(paceline.__file__).parent.parent
SERVER = """
import os, signal, sys, time
ready, behaviour = sys.argv[1], sys.argv[2]
if behaviour == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if behaviour == "broken":
    print('{"event": "start failed", "level": "error", "role": "x", "timestamp": "t", "error": "no weights"}')
    sys.exit(3)
print("cores", sorted(os.sched_getaffinity(0)), flush=True)
open(ready, "w").close()
while True:
    time.sleep(60)
"""


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ChildProcess]]:
    (tmp_path / "tiny_server.py").write_text(SERVER)
    children = []

    def run(behaviour: str = "good", cores: tuple[int, ...] = ()) -> ChildProcess:
        child = ChildProcess(
            "tiny",
            "tiny_server",
            [str(tmp_path / "ready"), behaviour],
            environment={"PYTHONPATH": str(tmp_path)},
            cores=cores,
            log_path=tmp_path / "tiny.log",
            ready_file=tmp_path / "ready",
        )
        children.append(child)
        return child

    yield run
    for child in children:
        child.kill()


def test_ready_then_stopped_by_asking(start: Callable[..., ChildProcess]) -> None:
    child = start()
    until(lambda: child.is_ready)
    assert child.stop(10.0)
    assert child.exit_code == -signal.SIGTERM
    assert not child.is_ready


def test_a_stubborn_child_is_killed(start: Callable[..., ChildProcess]) -> None:
    child = start("stubborn")
    until(lambda: child.is_ready)
    assert not child.stop(0.2)
    assert child.exit_code == -signal.SIGKILL


def test_an_old_ready_file_does_not_count(start: Callable[..., ChildProcess], tmp_path: Path) -> None:
    (tmp_path / "ready").touch()
    assert not start("broken").is_ready


def test_the_last_words_of_a_child_are_kept_for_people(start: Callable[..., ChildProcess]) -> None:
    child = start("broken")
    until(lambda: child.exit_code is not None)
    assert child.exit_code == 3
    assert child.last_lines() == ["error: start failed error=no weights"]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not pin processes")
def test_cores_are_set_before_the_program_starts(start: Callable[..., ChildProcess]) -> None:
    core = max(os.sched_getaffinity(0))
    child = start(cores=(core,))
    until(lambda: child.is_ready)
    assert child.last_lines() == [f"cores [{core}]"]


def test_a_killed_parent_leaves_no_child(tmp_path: Path) -> None:
    (tmp_path / "tiny_server.py").write_text(SERVER)
    parent_code = f"""
import time
from pathlib import Path
from paceline.embedded.process import ChildProcess
folder = Path({str(tmp_path)!r})
child = ChildProcess("tiny", "tiny_server", [str(folder / "ready"), "good"], environment={{"PYTHONPATH": str(folder)}},
                     cores=(), log_path=folder / "log", ready_file=folder / "ready")
(folder / "pid").write_text(str(child.pid))
time.sleep(60)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", parent_code], env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    try:
        until((tmp_path / "ready").exists)
        child_pid = int((tmp_path / "pid").read_text())
        assert psutil.pid_exists(child_pid)
    finally:
        parent.kill()
        parent.wait()
    until(
        lambda: not psutil.pid_exists(child_pid) or psutil.Process(child_pid).status() == psutil.STATUS_ZOMBIE
    )


def test_log_lines_for_people(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_lines(log, 3) == []
    log.write_text(
        '{"event": "settings", "settings": {}}\nplain\n[1]\n{"event": "a", "level": "info", "n": 1}\n'
    )
    assert last_lines(log, 3) == ["plain", "[1]", "info: a n=1"]
