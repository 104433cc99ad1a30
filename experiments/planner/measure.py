"""Times the choice of draft nodes that a verifier makes before each step.

Responsible for: candidates like those of real steps, the timing, and its summary. Called by the command beside it.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.scheduling import StepTable, allocate_nodes

_NUM_STEPS = 32  # different steps that take turns, so that no branch and no cache line is learned by heart
_WARM_UP = 50

Step = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of each choice.

    Attributes:
        samples_us: in the order in which they were measured.
        num_chosen: mean nodes chosen.
    """

    samples_us: tuple[float, ...]
    num_chosen: float

    @property
    def median_us(self) -> float:
        """Half of the choices took no longer; a neighbour on the machine moves it little."""
        return statistics.median(self.samples_us)

    def quantile_us(self, fraction: float) -> float:
        """Of the choices, that share took no longer."""
        return sorted(self.samples_us)[round(fraction * (len(self.samples_us) - 1))]


def random_steps(num_sequences: int, num_candidates: int, seed: int = 0) -> list[Step]:
    """Path acceptances of steps: per sequence a chain or a narrow tree, best first, each with its own acceptance."""
    source = random.Random(seed)
    steps: list[Step] = []
    for _ in range(_NUM_STEPS):
        sequences = []
        for _ in range(num_sequences):
            rate, path_acceptances, frontier = source.uniform(0.4, 0.95), list[float](), [1.0]
            while len(path_acceptances) < num_candidates:
                path_acceptance = frontier.pop(0) * min(1.0, max(0.0, source.gauss(rate, 0.1)))
                path_acceptances.append(path_acceptance)
                frontier.append(path_acceptance)
                if source.random() < 0.2:
                    frontier.append(path_acceptance * 0.3)
            sequences.append(tuple(sorted(path_acceptances, reverse=True)))
        steps.append(tuple(sequences))
    return steps


def measured_like_table(max_rows: int) -> StepTable:
    """A step time that is flat over a few rows, then rises, with a jump every 64 rows as on devices with tiles."""
    return StepTable(lambda rows: 0.012 + 0.00003 * rows + 0.002 * (rows // 64), max_rows)


def time_choices(steps: Sequence[Step], rounds: int, *, is_rejection: bool) -> Timing:
    """Time `allocate_nodes` on steps that take turns, one call at a time, the garbage collector off."""
    table = measured_like_table(max(len(step) + sum(map(len, step)) for step in steps))
    samples: list[float] = []
    num_chosen = 0
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        for which in range(-_WARM_UP, rounds):
            step = steps[which % len(steps)]
            begun_ns = time.perf_counter_ns()
            counts = allocate_nodes(step, table, is_rejection=is_rejection)
            ended_ns = time.perf_counter_ns()
            if which >= 0:
                samples.append((ended_ns - begun_ns) / 1e3)
                num_chosen += sum(counts)
    finally:
        if was_collecting:
            gc.enable()
    return Timing(tuple(samples), num_chosen / rounds)
