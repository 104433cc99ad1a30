"""One child process of a deployment.

Responsible for: starting it tied to this process, its log, readiness, and ending it by its process id.
Deliberately does not know: what it runs. Called by :mod:`paceline.embedded.deployment`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import paceline

_TETHER = Path(__file__).with_name("tether.py")
_LOG_TAIL_BYTES = 16_384
_KILL_TIMEOUT_S = 10.0


class ChildProcess:
    """A running child.

    Args:
        role: for messages.
        module: run with ``python -m``.
        flags: its arguments.
        environment: added to this process's own.
        cores: the only cores it may use; empty leaves it unpinned.
        log_path: its output is appended here.
        ready_file: the child writes it once it serves; an old one is removed.
    """

    def __init__(
        self,
        role: str,
        module: str,
        flags: Sequence[str],
        *,
        environment: Mapping[str, str],
        cores: Sequence[int],
        log_path: Path,
        ready_file: Path,
    ) -> None:
        self.role = role
        self.log_path = log_path
        self._ready_file = ready_file
        # A server exits at once, without draining, on a second SIGTERM.
        self._is_asked_to_end = False
        ready_file.unlink(missing_ok=True)
        tether = [sys.executable, "-I", "-S", str(_TETHER), str(os.getpid()), str(int(signal.SIGTERM))]
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*tether, sys.executable, "-m", module, *flags],
                env={**os.environ, **_import_path(), **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this process alone, which ends its children in order
            )
        if cores and hasattr(os, "sched_setaffinity"):
            # Early enough: the child is still in the tether, and its threads inherit the affinity.
            os.sched_setaffinity(self._process.pid, cores)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    @property
    def is_ready(self) -> bool:
        """Whether the child has reported that it serves."""
        return self.exit_code is None and self._ready_file.exists()

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal if the child still runs."""
        if self.exit_code is None:
            self._is_asked_to_end |= number == signal.SIGTERM
            self._process.send_signal(number)

    def stop(self, timeout_s: float) -> bool:
        """Sends SIGTERM, and SIGKILL after ``timeout_s``; returns whether SIGTERM was enough."""
        if not self._is_asked_to_end:
            self.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        return True

    def kill(self) -> None:
        """Ends the child at once."""
        self.send_signal(signal.SIGKILL)
        self._process.wait(_KILL_TIMEOUT_S)

    def last_lines(self, count: int = 12) -> list[str]:
        """The end of its log; JSON lines as text for people."""
        return last_lines(self.log_path, count)


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a log, JSON lines as text for people."""
    if not path.is_file():
        return []
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - _LOG_TAIL_BYTES))
        lines = stream.read().decode(errors="replace").splitlines()
    shown = [text for line in lines for text in _readable(line).splitlines()]
    return [text[:400] for text in shown[-count:]]


def _readable(line: str) -> str:
    try:
        event = json.loads(line)
    except ValueError:
        return line
    if not isinstance(event, dict) or event.get("event") == "settings":
        return "" if isinstance(event, dict) else line
    exception = event.pop("exception", "")
    text = f"{event.pop('level', '')}: {event.pop('event', '')}"
    for name in ("timestamp", "role"):
        event.pop(name, None)
    fields = " ".join(f"{name}={value}" for name, value in event.items())
    return f"{text} {fields}\n{exception}".strip()


def _import_path() -> dict[str, str]:
    """Lets a child find the packages beside ``paceline`` when they are used from a checkout."""
    root = Path(paceline.__file__).parent.parent
    if not (root / "pyproject.toml").is_file():
        return {}
    return {"PYTHONPATH": os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])}
