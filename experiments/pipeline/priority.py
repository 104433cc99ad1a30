"""Real-time priority for the processes of a laboratory, so that other work on the machine does not delay their waking.

They sleep nearly all the time; what matters is that they run at once when a message or a deadline wakes them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import psutil

from paceline.contract.errors import UnavailableError

PRIORITY = 1


def raise_priority(pids: Iterable[int]) -> int:
    """Puts every thread of these processes and of their descendants in the round-robin real-time class.

    Threads that they start later inherit it; other children of this process do not get it.

    Returns:
        How many threads it reached.

    Raises:
        UnavailableError: the system does not allow it (it takes CAP_SYS_NICE), or knows no such class.
    """
    if not hasattr(os, "sched_setscheduler"):
        raise UnavailableError("this system has no real-time scheduling class")
    count = 0
    for pid in _families(pids):
        for task in _tasks(pid):
            try:
                os.sched_setscheduler(task, os.SCHED_RR, os.sched_param(PRIORITY))
            except PermissionError:
                raise UnavailableError("real-time priority is not permitted here") from None
            except ProcessLookupError:  # it ended meanwhile
                continue
            count += 1
    return count


def _families(pids: Iterable[int]) -> list[int]:
    found: list[int] = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            family = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
            found += [each for each in family if each not in found]
    return found


def _tasks(pid: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        return [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    return []
