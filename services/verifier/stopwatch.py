"""Where the time of a step goes: laps, one after the other, each under the name of what was done in it.

What lies between two forward passes and is neither a wait nor a draft is the system's overhead: the target stands still
for it. Knows nothing of what is timed. Used by the step loop, on its thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum


class StepStage(StrEnum):
    """Parts of a step, in order."""

    IDLE = "idle"  # nothing to run
    COMMANDS = "commands"  # openings, closings and drafts taken in
    DRAFT_WAIT = "draft_wait"  # waiting for drafts that are due
    SCHEDULE = "schedule"  # which rows to run
    FORWARD = "forward"  # the target's pass
    VERIFY = "verify"  # rules, choices, acceptance
    COMMIT = "commit"  # caches, tries and texts moved on
    REPORT = "report"  # frames and metrics
    DRAFT = "draft"  # a drafter in this process


OVERHEAD = (StepStage.COMMANDS, StepStage.SCHEDULE, StepStage.VERIFY, StepStage.COMMIT, StepStage.REPORT)
"""The stages for which the target waits although it has work and nobody is late."""


class Stopwatch:
    """Laps of the step under way.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lap_began = clock()
        self._laps = dict.fromkeys(StepStage, 0.0)

    def lap(self, stage: StepStage) -> float:
        """The time since the last lap goes to a stage; returns now."""
        now = self._clock()
        self._laps[stage] += now - self._lap_began
        self._lap_began = now
        return now

    def so_far(self, *stages: StepStage) -> float:
        """Seconds of some stages since `take` was last called."""
        return sum(self._laps[stage] for stage in stages)

    def take(self) -> dict[StepStage, float]:
        """Seconds by stage since this was last called."""
        laps, self._laps = self._laps, dict.fromkeys(StepStage, 0.0)
        return laps


def overhead_s(laps: dict[StepStage, float]) -> float:
    """Seconds of a step that the system took for itself."""
    return sum(laps[stage] for stage in OVERHEAD)
