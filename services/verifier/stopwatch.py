"""Where the time of a step goes: consecutive laps, each counted for one stage.

Between two forward passes, everything that is neither a wait nor a draft is overhead: the target idles meanwhile.

Deliberately does not know: what is timed.

Called by: the step loop, on its thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum


class StepStage(StrEnum):
    """Parts of a step, in order."""

    IDLE = "idle"  # nothing to run
    COMMANDS = "commands"  # sequences opened and closed, drafts added
    DRAFT_WAIT = "draft_wait"  # waiting for drafts that are due
    SCHEDULE = "schedule"  # which rows to run
    FORWARD = "forward"  # the target's pass
    VERIFY = "verify"  # rules, choices, acceptance
    COMMIT = "commit"  # caches, tries and texts updated
    REPORT = "report"  # the step's event
    DRAFT = "draft"  # drafting in this process


OVERHEAD = (StepStage.COMMANDS, StepStage.SCHEDULE, StepStage.VERIFY, StepStage.COMMIT, StepStage.REPORT)
"""The stages that keep the target idle although it has work and no draft is late."""


class Stopwatch:
    """Laps of the current step.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lap_began = clock()
        self._laps = dict.fromkeys(StepStage, 0.0)

    def lap(self, stage: StepStage) -> float:
        """Count the time since the last lap for a stage; returns the current time."""
        now = self._clock()
        self._laps[stage] += now - self._lap_began
        self._lap_began = now
        return now

    def so_far(self, *stages: StepStage) -> float:
        """Seconds of the given stages since the last `take`."""
        return sum(self._laps[stage] for stage in stages)

    def take(self) -> dict[StepStage, float]:
        """Seconds by stage since the last `take`."""
        laps, self._laps = self._laps, dict.fromkeys(StepStage, 0.0)
        return laps


def overhead_s(laps: dict[StepStage, float]) -> float:
    """Overhead seconds of a step."""
    return sum(laps[stage] for stage in OVERHEAD)
