"""Stretches steps to the duration of a slower target, for experiments.

Responsible for: the curve of step time over rows, and waiting until a step has lasted that long.

Deliberately does not know: what a step does.

Called by: the engine, as its executor, so that everything else happens as with a slower target. It sleeps while it
waits, so that other processes can use the core.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from paceline.contract.errors import InvalidRequestError
from paceline.target.attention.attend import StepPlan
from paceline.target.executor import Executor, ExecutorOutput, nothing


@dataclass(frozen=True, slots=True)
class StretchCurve:
    """Step time over the rows of the step, linear between points.

    Fewer rows than the first point take the first point's time. Beyond the last point the last slope continues.
    A single point holds for any number of rows.

    Attributes:
        points: (rows, milliseconds), rows ascending; at least one.
    """

    points: tuple[tuple[int, float], ...]

    @classmethod
    def parse(cls, text: str) -> StretchCurve:
        """Read ``rows:ms`` pairs such as ``1:30,16:30,64:48``, or one number of milliseconds for any step.

        Raises:
            InvalidRequestError: the text has another form, or rows do not ascend.
        """
        points: list[tuple[int, float]] = []
        for part in text.split(","):
            match = re.fullmatch(r"\s*(?:(\d{1,6}):)?(\d{1,5}(?:\.\d{1,6})?)\s*", part)
            if match is None or (match[1] is None and "," in text):
                raise InvalidRequestError("step_curve", f"expected rows:ms pairs or one number, got {text!r}")
            points.append((int(match[1] or 1), float(match[2])))
        rows = [count for count, _ in points]
        if rows[0] < 1 or any(later <= earlier for earlier, later in pairwise(rows)):
            raise InvalidRequestError("step_curve", f"rows must ascend from 1 on, got {text!r}")
        return cls(tuple(points))

    def step_s(self, num_rows: int) -> float:
        """Duration in seconds of a step of so many rows."""
        points = self.points
        after = bisect_right(points, num_rows, key=lambda point: point[0])
        if after == 0 or len(points) == 1:
            return points[0][1] * 1e-3
        (left, left_ms), (right, right_ms) = (
            points[after - 1 : after + 1] if after < len(points) else points[-2:]
        )
        return max(0.0, left_ms + (right_ms - left_ms) * (num_rows - left) / (right - left)) * 1e-3


class StepClock:
    """Stretches steps to a curve.

    Args:
        curve: how long a step lasts.
        clock: monotonic, seconds.
        sleep: waits for a number of seconds.
    """

    def __init__(
        self,
        curve: StretchCurve,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._curve = curve
        self._clock = clock
        self._sleep = sleep

    def now(self) -> float:
        """Seconds on the clock."""
        return self._clock()

    def stretch(self, started_s: float, num_rows: int) -> None:
        """Return when the step that began at `started_s` has lasted as long as the curve says."""
        ends_s = started_s + self._curve.step_s(num_rows)
        while (left_s := ends_s - self._clock()) > 0:
            self._sleep(left_s)


class StretchedExecutor:
    """An executor whose passes last as long as a slower target's.

    Args:
        executor: computes the passes.
        clock: says how long each lasts.
    """

    def __init__(self, executor: Executor, clock: StepClock) -> None:
        self.shape = executor.shape
        self.num_bytes = executor.num_bytes
        self.joins_neighbours = executor.joins_neighbours
        self.embed = executor.embed
        self.head = executor.head
        self._executor = executor
        self._clock = clock

    def forward(self, plan: StepPlan, on_begin: Callable[[], None] = nothing) -> ExecutorOutput:
        """Run the planned rows, and return when the pass has lasted as long as the clock says."""
        started_s = self._clock.now()
        output = self._executor.forward(plan, on_begin)
        self._clock.stretch(started_s, plan.num_rows)
        return output
