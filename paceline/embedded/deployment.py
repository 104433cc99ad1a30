"""A whole Paceline on one machine: Redis and every role as real processes.

Responsible for: start order, readiness, restarts, and an end that leaves no process, port or file. Deliberately
does not know: what the processes do, and how to print for people. Called by the command line, integration tests
and the benchmark.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from paceline.embedded.commands import MODULES, server_flags
from paceline.embedded.cores import CorePlan, available_cores, plan_cores, thread_environment
from paceline.embedded.failure import DeploymentError
from paceline.embedded.options import DeploymentOptions
from paceline.embedded.ports import Ports
from paceline.embedded.process import ChildProcess, last_lines
from paceline.embedded.redis_server import RedisServer
from paceline.embedded.spawner import Spawner
from paceline.embedded.strays import end_sessions

_POLL_S = 0.02
# How long a process may take after its drain to close and exit; Ray needs the most.
_EXIT_MARGIN_S = 10.0
# The gateway first; the last three do not depend on one another. Redis stops after all of them.
_STOP_ORDER = (("gateway",), ("orchestrator",), ("drafter", "verifier", "scheduler"))
# Ray creates sockets deep below the temporary directory, and a socket's path has at most 107 bytes.
_MAX_TEMP_ROOT = 8

Progress = Callable[[str, str], None]


class Deployment:
    """A deployment that runs between ``start`` and ``stop``, or as a context manager.

    Args:
        options: what to run.
        progress: called with role and state ("starting", "ready", "stopped") at every change.

    Attributes:
        plan: cores and threads of each process.
        ports: of every role.
    """

    def __init__(self, options: DeploymentOptions, progress: Progress | None = None) -> None:
        self._options = options
        self._progress = progress or (lambda role, state: None)
        self.plan: CorePlan = plan_cores(options, available_cores())
        self.ports = options.ports or Ports.free()
        self._directory: Path | None = None
        self._redis: RedisServer | None = None
        self._children: dict[str, ChildProcess] = {}
        self._spawner: Spawner | None = None

    def __enter__(self) -> Deployment:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def gateway_endpoint(self) -> str:
        """Where clients call."""
        return self.endpoint("gateway")

    @property
    def processes(self) -> dict[str, int]:
        """Process ids by role, of processes that were started and not stopped."""
        pids = {role: child.pid for role, child in self._children.items()}
        return {"redis": self._redis.pid, **pids} if self._redis is not None else pids

    @property
    def directory(self) -> Path | None:
        """The directory of temporary files; None before the start and after the end."""
        return self._directory

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of this deployment in the order in which they start."""
        return self._options.roles

    def endpoint(self, role: str) -> str:
        """host:port of a role's gRPC server."""
        return f"127.0.0.1:{self.ports.grpc[role]}"

    def metrics_url(self, role: str) -> str:
        """Where a role shows its metrics."""
        return f"http://127.0.0.1:{self.ports.metrics[role]}/metrics"

    def log_path(self, role: str) -> Path:
        """Log of a role."""
        if role == "redis":
            return self._require_directory() / "redis" / "redis.log"
        directory = self._options.log_dir or self._require_directory()
        return directory / f"{role}.log"

    def start(self) -> None:
        """Starts everything and returns once clients can be served.

        Raises:
            DeploymentError: a process did not start; everything that had been started has ended.
        """
        taken = self.ports.taken()
        if taken:
            listed = ", ".join(f"{port} ({role})" for role, port in taken)
            raise DeploymentError(taken[0][0], f"cannot listen on {listed}", ["Address already in use"])
        deadline = time.monotonic() + self._options.start_timeout_s
        self._directory = Path(tempfile.mkdtemp(prefix="pl-", dir=_temp_root()))
        self._spawner = Spawner()
        try:
            if self._options.log_dir is not None:
                self._options.log_dir.mkdir(parents=True, exist_ok=True)
            # All at once: weights load while Ray starts, and each process waits for the peers it needs.
            for role in self.roles:
                self._start_role(role)
            self._wait_until_ready(self.roles, deadline)
        except BaseException:
            self.kill_all()  # nothing was admitted, and a process that is loading would finish loading first
            self.stop()
            raise

    def stop(self) -> None:
        """Ends everything in order, the gateway first. Safe to call twice."""
        for group in _STOP_ORDER:
            children = [self._children[role] for role in group if role in self._children]
            for child in children:
                child.send_signal(signal.SIGTERM)
            for child in children:
                child.stop(self._options.drain_s + _EXIT_MARGIN_S)
                del self._children[child.role]
                self._progress(child.role, "stopped")
        if self._redis is not None:
            self._redis.stop()
            self._redis = None
            self._progress("redis", "stopped")
        if self._spawner is not None:
            self._spawner.close()
            self._spawner = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def restart(self, role: str) -> None:
        """Ends one process, if it runs, and starts it again on its old ports; returns once it is ready.

        Raises:
            DeploymentError: it did not start.
        """
        if role == "redis":
            if self._redis is not None:
                self._redis.stop()
        else:
            child = self._children.get(role)
            if child is not None:
                child.stop(self._options.drain_s + _EXIT_MARGIN_S)
                # A killed orchestrator's leftovers occupy the ports of the next one.
                end_sessions({child.pid})
        self._start_role(role)
        self._wait_until_ready((role,), time.monotonic() + self._options.start_timeout_s)

    def kill(self, role: str) -> None:
        """Ends one process as a crash would (SIGKILL)."""
        if role == "redis":
            assert self._redis is not None, "not started"
            self._redis.kill()
        else:
            self._children[role].kill()

    def kill_all(self) -> None:
        """Ends every process at once; ``stop`` must still clean up. Safe to call from a signal handler."""
        for pid in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def dead(self) -> dict[str, int]:
        """Exit codes by role, of processes that ended by themselves."""
        codes = {role: child.exit_code for role, child in self._children.items()}
        if self._redis is not None:
            codes["redis"] = self._redis.process.poll()
        return {role: code for role, code in codes.items() if code is not None}

    def last_lines(self, role: str, count: int = 12) -> list[str]:
        """The end of a role's log, for people."""
        return last_lines(self.log_path(role), count)

    def _require_directory(self) -> Path:
        assert self._directory is not None, "not started"
        return self._directory

    def _start_role(self, role: str) -> None:
        assert self._spawner is not None, "not started"
        self._progress(role, "starting")
        if role == "redis":
            port = self._redis.port if self._redis is not None else self.ports.redis
            directory = self._require_directory() / "redis"
            self._redis = self._spawner.run(RedisServer.start, directory, port=port)
            self._progress("redis", "ready")
        else:
            self._children[role] = self._start_child(role)

    def _start_child(self, role: str) -> ChildProcess:
        directory, plan = self._require_directory(), self.plan
        ready_file = directory / f"{role}.ready"
        assert self._redis is not None, "redis starts first"
        threads, cores = {
            "verifier": (plan.verifier_threads, plan.verifier),
            "drafter": (plan.drafter_threads, plan.drafter),
        }.get(role, (1, plan.control))
        assert self._spawner is not None, "not started"
        return self._spawner.start_child(
            role,
            self._options.modules.get(role, MODULES[role]),
            server_flags(role, self._options, plan, self.ports, self._redis.url, ready_file),
            environment={
                **thread_environment(threads),
                "TMPDIR": str(directory),
                "PYTHONUNBUFFERED": "1",
                "RAY_USAGE_STATS_ENABLED": "0",
            },
            cores=cores,
            log_path=self.log_path(role),
            ready_file=ready_file,
        )

    def _wait_until_ready(self, roles: tuple[str, ...], deadline: float) -> None:
        waiting = [self._children[role] for role in roles if role in self._children]
        while waiting:
            for child in list(waiting):
                code = child.exit_code
                if code is not None:
                    what = f"ended with code {code} while starting"
                    raise DeploymentError(child.role, what, child.last_lines(), code)
                if child.is_ready:
                    waiting.remove(child)
                    self._progress(child.role, "ready")
            if waiting and time.monotonic() > deadline:
                what = f"was not ready within {self._options.start_timeout_s:g} s"
                raise DeploymentError(waiting[0].role, what, waiting[0].last_lines())
            time.sleep(_POLL_S)


def _temp_root() -> str | None:
    """The system's temporary directory, or ``/tmp`` where that one is too deep for Ray's sockets."""
    root = tempfile.gettempdir()
    return root if len(root) <= _MAX_TEMP_ROOT or not os.access("/tmp", os.W_OK) else "/tmp"
