"""A reader at a terminal: a page's blocks in one bash session, in a clean folder.

Responsible for: the session, a second terminal for `paceline up`, and the end of all that was started. Deliberately
does not know: what a page is about. Used by `test_pages.py`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.pages import ROOT, Block

_MARK = "PACELINE_PAGE"
_END_S = 30.0

# A command that fails ends the session. `paceline up` goes to a second terminal, where Ctrl-C ends it later.
_PROLOGUE = """
set -E -o pipefail
trap 'code=$?; echo "exit $code of: $BASH_COMMAND" > "$STATE/failed"; exit 1' ERR
up=
paceline() {
  if [ "$1" != up ]; then command paceline "$@"; return; fi
  interrupt_up
  command paceline "$@" > "$STATE/up" 2>&1 & up=$!
  until grep -q '^ready after' "$STATE/up"; do
    kill -0 $up 2> /dev/null || { cat "$STATE/up"; return 1; }
    sleep 0.1
  done
}
interrupt_up() {
  [ -n "$up" ] || return 0
  kill -INT $up
  code=0; wait $up || code=$?
  up=
  [ $code = 130 ] || { echo "paceline up ended with $code after Ctrl-C"; cat "$STATE/up"; return 1; }
}
"""


class PageFailure(AssertionError):
    """A command failed, or a process was left."""


def run_blocks(blocks: Sequence[Block], folder: Path, state: Path, timeout_s: float) -> list[str]:
    """Runs blocks as they are written, one after another; returns what each one printed.

    Args:
        blocks: of one page, in order.
        folder: an empty folder, where the commands run.
        state: an empty folder for the session's own files.
        timeout_s: for all blocks.

    Raises:
        PageFailure: a command failed, or a process outlived the session.
    """
    mark = uuid.uuid4().hex
    lines = [_PROLOGUE]
    for index, block in enumerate(blocks):
        file = state / f"block-{index}"
        file.write_text(block.text)
        how = "python" if block.language == "python" else "."
        lines.append(f'echo {index} > "$STATE/at"\n{{ {how} "{file}"; }} > "$STATE/out-{index}" 2>&1\n')
    lines.append(f'{{ interrupt_up; }} >> "$STATE/out-{len(blocks) - 1}" 2>&1\n')
    script = state / "page"
    script.write_text("".join(lines))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PATH": path, "PYTHONPATH": str(ROOT), "STATE": str(state), "COLUMNS": "80", _MARK: mark}
    environment["XDG_RUNTIME_DIR"] = str(state)  # deployments of others on this machine are not listed
    with (state / "session").open("wb") as session:
        bash = subprocess.Popen(
            ["bash", "--noprofile", "--norc", str(script)],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=session,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code = bash.wait(timeout_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        left = _end_all(mark)
        bash.kill()
        bash.wait()
    if code != 0:
        at = int((state / "at").read_text())
        failed = state / "failed"
        why = failed.read_text() if failed.is_file() else f"exit {code}, or not done within {timeout_s:.0f} s"
        output = (state / f"out-{at}").read_text()[-4000:] + (state / "session").read_text()[-1000:]
        raise PageFailure(f"{blocks[at]}: {why}\n{output}")
    if left:
        raise PageFailure(f"{blocks[0].page}: these processes were left: {left}")
    return [(state / f"out-{index}").read_text() for index in range(len(blocks))]


def _end_all(mark: str) -> list[str]:
    """Ends what runs with this mark in its environment; returns its command lines."""
    left = [process for process in psutil.process_iter() if _has_mark(process, mark)]
    described = [f"{process.pid} {process.name()}" for process in left if process.is_running()]
    deployments = [process for process in left if "up" in _words(process)]
    for process in deployments:
        process.send_signal(signal.SIGINT)  # it ends its own children, in order
    psutil.wait_procs(deployments, timeout=_END_S)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=_END_S)
    return described


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == mark
    except (psutil.Error, OSError):
        return False


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
