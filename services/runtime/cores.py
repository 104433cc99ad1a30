"""Which processor cores a computing process may use.

Responsible for: parsing a core list, pinning the computing thread, and setting how many threads OpenMP starts
and how long a waiting one spins, before torch is imported. Two torch threads that spin beside another busy
process on two cores ran 10 to 20 times slower when measured.

Only the threads that load and compute, and the OpenMP threads they start, are pinned. The event loop and gRPC's
threads may run on any core: on the computing core their messages would wait for the next step.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from paceline.contract.errors import InvalidRequestError

SWITCH_INTERVAL_S = 0.0002


@dataclass(frozen=True, slots=True)
class Pinning:
    """The cores and the number of threads to compute with.

    Attributes:
        cores: the requested cores, or all allowed ones.
        num_threads: OpenMP threads, the computing thread included.
        is_fixed: whether cores were requested.
    """

    cores: tuple[int, ...]
    num_threads: int
    is_fixed: bool = False

    def pin_thread(self) -> None:
        """Pin the calling thread, and the threads it starts from now on, if cores were requested."""
        if self.is_fixed:
            os.sched_setaffinity(0, self.cores)


def parse_cores(text: str) -> tuple[int, ...]:
    """Parse ``0-3,6`` into core numbers, ascending and unique.

    Raises:
        InvalidRequestError: the text is not a core list.
    """
    cores: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        bounds = (first, last if dash else first)
        if not all(bound.isascii() and bound.isdigit() and len(bound) <= 5 for bound in bounds):
            raise InvalidRequestError("cores", f"expected a list such as 0-3,6, got {text!r}")
        begin, end = int(bounds[0]), int(bounds[1])
        if begin > end:
            raise InvalidRequestError("cores", f"{part.strip()} runs backwards")
        cores.update(range(begin, end + 1))
    return tuple(sorted(cores))


def plan_pinning(cores: str | None = None, threads: int | None = None) -> Pinning:
    """Check the requested cores, and set the thread count in the environment (one per core by default).

    Raises:
        InvalidRequestError: a core that this process may not use, or a thread count below 1.
    """
    allowed = os.sched_getaffinity(0)
    wanted = tuple(sorted(allowed)) if cores is None else parse_cores(cores)
    missing = sorted(set(wanted) - allowed)
    if missing:
        raise InvalidRequestError("cores", f"{missing} are not among the allowed cores {sorted(allowed)}")
    num_threads = len(wanted) if threads is None else threads
    if num_threads < 1:
        raise InvalidRequestError("threads", "must be at least 1")
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    # Short spins: a waiting thread neither blocks a core for long nor needs to be woken for every product.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000" if num_threads > 1 else "0")
    return Pinning(wanted, num_threads, cores is not None)


def share_interpreter() -> None:
    """Return the interpreter lock to a computing thread soon after each call into a kernel.

    The event loop takes the lock while the kernel runs, and may keep it for the switch interval: five
    milliseconds by default, which is half a step of a small target. With this setting a co-located round of
    SmolLM2 took 17.3 ms, not 18.6.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
