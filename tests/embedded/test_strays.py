"""Leftovers of our own children are ended, whatever they call themselves; nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from paceline.embedded.strays import end_marked, end_sessions

SLEEP = "import time; time.sleep(60)"


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def leftover(tmp_path: Path) -> tuple[int, int]:
    """A child in a session of its own that ended, and the process that it left: (child, leftover)."""
    pid_file = tmp_path / "pid"
    code = (
        "import subprocess, sys\n"
        f"left = subprocess.Popen([sys.executable, '-c', {SLEEP!r}], env={{}})\n"
        f"open({str(pid_file)!r}, 'w').write(str(left.pid))"
    )
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    assert child.wait(20) == 0
    return child.pid, int(pid_file.read_text())


def test_what_an_ended_child_left_is_ended(leftover: tuple[int, int]) -> None:
    child, left = leftover
    assert is_running(left)
    end_sessions({child})
    deadline = time.monotonic() + 10
    while is_running(left):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_session_whose_leader_lives_is_left_alone() -> None:
    leader = subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True)
    try:
        end_sessions({leader.pid})
        assert is_running(leader.pid)
    finally:
        leader.kill()
        leader.wait()


def test_only_marked_processes_are_ended() -> None:
    marked, other = (
        subprocess.Popen([sys.executable, "-c", SLEEP], env={**os.environ, "PACELINE_TEST_MARK": value})
        for value in ("ours", "theirs")
    )
    try:
        deadline = time.monotonic() + 10  # the environment is the parent's until the program has been loaded
        while psutil.Process(marked.pid).environ().get("PACELINE_TEST_MARK") != "ours":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        end_marked("PACELINE_TEST_MARK", "ours")
        assert not is_running(marked.pid)
        assert is_running(other.pid)
    finally:
        for process in (marked, other):
            process.kill()
            process.wait()
