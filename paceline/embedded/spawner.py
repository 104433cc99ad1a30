"""Starts the children of a deployment, and ends what they leave behind.

Responsible for: the thread that starts children, and marking them so that their leftovers can be found. The
kernel ties a child to the thread that started it. So one thread starts all children, and it lives as long as
they do.

Deliberately does not know: roles, ports, readiness. Called by :mod:`paceline.embedded.deployment`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from paceline.embedded.process import ChildProcess
from paceline.embedded.strays import end_marked, end_sessions

_MARKER = "PACELINE_DEPLOYMENT_ID"

P = ParamSpec("P")
T = TypeVar("T")


class Spawner:
    """One thread that starts children; every child has the spawner's id in its environment."""

    def __init__(self) -> None:
        self._id = uuid.uuid4().hex
        self._sessions: set[int] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="paceline-spawner")

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that starts a process, on the spawner's thread."""
        return self._thread.submit(function, *args, **kwargs).result()

    def start_child(
        self, role: str, module: str, flags: list[str], *, environment: Mapping[str, str], **options: Any
    ) -> ChildProcess:
        """Start a child; the arguments are those of `ChildProcess`."""
        marked = {**environment, _MARKER: self._id}
        child = self.run(ChildProcess, role, module, flags, environment=marked, **options)
        self._sessions.add(child.pid)
        return child

    def close(self) -> None:
        """End processes that ended children have left, then the thread."""
        end_sessions(self._sessions)
        end_marked(_MARKER, self._id)
        self._thread.shutdown()
