"""Links in a process of their own, and their control from an experiment."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from experiments.link.proxy import Counters
from experiments.link.settings import LinkSettings
from paceline.contract.errors import InvalidRequestError, UnavailableError

_END_TIMEOUT_S = 10.0


class LinkProcess:
    """Links that are up while the context is held; a process of its own keeps their timing off this one's lock.

    Args:
        targets: name of each link to the host:port behind it; nothing needs to listen there yet.
    """

    def __init__(self, targets: Mapping[str, str]) -> None:
        self._targets = dict(targets)
        self._process: subprocess.Popen[str] | None = None
        self._ports: dict[str, int] = {}

    def __enter__(self) -> LinkProcess:
        arguments = [f"{name}={target}" for name, target in self._targets.items()]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "experiments.link", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches the experiment alone, which ends it
        )
        try:
            self._ports = self._read()["ports"]
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process is not None, "not started"
        return self._process.pid

    def endpoint(self, name: str) -> str:
        """host:port at which a link's target is reached through it."""
        return f"127.0.0.1:{self._ports[name]}"

    def set(self, name: str, forward: LinkSettings, back: LinkSettings | None = None) -> None:
        """Changes a link for the bytes that come in from now on.

        Args:
            name: of the link.
            forward: towards the target.
            back: from the target; None: the same.

        Raises:
            InvalidRequestError: no such link.
            UnavailableError: the process has ended.
        """
        both = (forward, forward if back is None else back)
        self._ask({"link": name, "forward": both[0].as_dict(), "back": both[1].as_dict()})

    def set_round_trip(self, name: str, round_trip_ms: float) -> None:
        """Half of it each way, and nothing else."""
        self.set(name, LinkSettings(delay_ms=round_trip_ms / 2))

    def counters(self) -> dict[str, Counters]:
        """Bytes that each link has handed on.

        Raises:
            UnavailableError: the process has ended.
        """
        return {name: Counters(**values) for name, values in self._ask({})["counters"].items()}

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it ended before
            process.stdin.close()
        try:
            process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def _ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process is not None, "not started"
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(dict(command)) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise UnavailableError("the link's process has ended") from None
        answer = self._read()
        if "error" in answer:
            raise InvalidRequestError("link", answer["error"])
        return answer

    def _read(self) -> dict[str, Any]:
        assert self._process is not None, "not started"
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise UnavailableError("the link's process has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer
