"""Ends leftover processes of a deployment's children, and no other processes.

Responsible for: distinguishing our leftovers from other processes. A killed orchestrator leaves Ray's
processes; some of them overwrite their environment with their title, so the environment alone does not find
them. Deliberately does not know: roles. Called by :mod:`paceline.embedded.spawner` and
:mod:`paceline.embedded.deployment`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable

import psutil

_EXIT_TIMEOUT_S = 10.0


def end_sessions(leaders: Collection[int]) -> None:
    """Ends processes that are left in the sessions of children that have ended.

    The kernel does not reuse a session's number while a process is left in it. If a process with that number is
    alive, then either the session belongs to somebody else or the child has not ended; neither is touched.

    Args:
        leaders: process ids of children; each was started in a session of its own.
    """
    gone = {leader for leader in leaders if not psutil.pid_exists(leader)}
    if gone:
        _end(process for process in psutil.process_iter() if _session(process.pid) in gone)


def end_marked(name: str, value: str) -> None:
    """Ends processes whose environment has this entry; only our children were ever given it."""
    _end(process for process in psutil.process_iter() if _entry(process, name) == value)


def _end(processes: Iterable[psutil.Process]) -> None:
    ending = []
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
        ending.append(process)
    psutil.wait_procs(ending, timeout=_EXIT_TIMEOUT_S)


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:  # gone
        return None


def _entry(process: psutil.Process, name: str) -> str | None:
    try:
        return process.environ().get(name)
    except (psutil.Error, OSError):  # another user's, or gone
        return None
