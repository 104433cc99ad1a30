"""Which cores the processes of one machine get.

Responsible for: the plan, its description for people, and the environment that keeps waiting threads from using
other processes' cores. Deliberately does not know: how a process is pinned or started. Called by
:mod:`paceline.embedded.deployment`.

Two torch threads beside another busy process on two cores ran 10 to 20 times slower when measured, so each
computing process gets cores of its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.contract.errors import InvalidRequestError
from paceline.embedded.options import DeploymentOptions, Placement

SPIN_COUNT = "10000"


@dataclass(frozen=True, slots=True)
class CorePlan:
    """Cores and torch threads; an empty tuple leaves a process unpinned.

    Attributes:
        verifier: cores of the target.
        verifier_threads: its torch threads.
        drafter: cores of a separate drafter process.
        drafter_threads: its torch threads.
        control: cores of gateway, orchestrator, scheduler and Redis.
        is_shared: whether target and drafter must share cores.
    """

    verifier: tuple[int, ...]
    verifier_threads: int
    drafter: tuple[int, ...] = ()
    drafter_threads: int = 0
    control: tuple[int, ...] = ()
    is_shared: bool = False

    def describe(self) -> list[str]:
        """One line per kind of process."""
        lines = [f"verifier: cores {_listed(self.verifier)}, {_threads(self.verifier_threads)}"]
        if self.drafter_threads:
            lines.append(f"drafter: cores {_listed(self.drafter)}, {_threads(self.drafter_threads)}")
        lines.append(f"others: {'cores ' + _listed(self.control) if self.control else 'any core'}")
        if self.is_shared:
            lines.append("one core only: target and drafter take turns on it, which makes both slow")
        return lines


def available_cores() -> list[int]:
    """Cores that this process may use, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def plan_cores(options: DeploymentOptions, available: Sequence[int]) -> CorePlan:
    """Divides the cores that this process may use.

    A separate drafter gets one core, the last. The target gets all others, and processes that do not compute
    stay off the target's cores. If only the drafter's core is left and the target has one thread, those
    processes may use both cores: while the target waits for drafts they need not use the drafter's core (a
    waiting round of SmolLM2 took 6.9 ms in place of 8.9). With several target threads, all would wait for an
    interrupted one. Without a separate drafter the target gets all cores but the last, which the other
    processes use: a step's threads wait for one another. On two cores that gateway, orchestrator and event
    loops used too, two threads decoded at 0.5 to 0.85 of the speed of one.

    Args:
        options: may fix any part of the plan.
        available: cores that may be used, at least one.

    Raises:
        InvalidRequestError: a fixed core is not available.
    """
    cores = tuple(sorted(available))
    for name in ("verifier_cores", "drafter_cores", "control_cores"):
        missing = sorted(set(getattr(options, name) or ()) - set(cores))
        if missing:
            raise InvalidRequestError(name, f"{missing} are not among the available cores {list(cores)}")
    if options.placement is not Placement.SEPARATE:
        control = (
            options.control_cores or tuple(c for c in cores if c not in (options.verifier_cores or ()))[-1:]
        )
        verifier = options.verifier_cores or tuple(core for core in cores if core not in control) or cores
        return CorePlan(
            verifier=verifier,
            verifier_threads=options.verifier_threads or len(verifier),
            control=control,
        )
    drafter = (
        options.drafter_cores
        or tuple(c for c in cores if c not in (options.verifier_cores or ()))[-1:]
        or cores
    )
    verifier = options.verifier_cores or tuple(core for core in cores if core not in drafter) or cores
    others = tuple(core for core in cores if core not in verifier)
    has_to_share = len(verifier) == 1 and set(others) <= set(drafter)
    return CorePlan(
        verifier=verifier,
        verifier_threads=options.verifier_threads or len(verifier),
        drafter=drafter,
        drafter_threads=options.drafter_threads or len(drafter),
        control=options.control_cores or (cores if has_to_share else others),
        is_shared=bool(set(verifier) & set(drafter)),
    )


def thread_environment(num_threads: int) -> dict[str, str]:
    """Environment that limits OpenMP's threads and how long a waiting one spins.

    A thread that keeps spinning takes its core from others; one that sleeps at once must be woken for every
    product. On two cores a step of SmolLM2 took 31 ms with sleeping threads, and 23 ms with threads that spin
    10,000 times (some tens of microseconds) or without limit.
    """
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        "GOMP_SPINCOUNT": SPIN_COUNT if num_threads > 1 else "0",
        "KMP_BLOCKTIME": "1" if num_threads > 1 else "0",
        "TOKENIZERS_PARALLELISM": "false",
    }


def format_cores(cores: Sequence[int]) -> str:
    """Cores as the servers' ``--cores`` flag reads them."""
    return ",".join(str(core) for core in cores)


def parse_cores(text: str) -> tuple[int, ...]:
    """Reads a list such as ``0-3,6``.

    Raises:
        InvalidRequestError: the text is not such a list.
    """
    cores: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise InvalidRequestError("cores", f"expected a list such as 0-3,6, got {text!r}")
        cores.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(cores))


def _listed(cores: Sequence[int]) -> str:
    return format_cores(cores) if len(cores) <= 8 else f"{cores[0]}..{cores[-1]} ({len(cores)})"


def _threads(count: int) -> str:
    return "1 torch thread" if count == 1 else f"{count} torch threads"
