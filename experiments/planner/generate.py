"""Generates step traces from a seed: they are simulated, not recorded.

Responsible for: worlds that change the way real ones do, and their sizes. Acceptance drifts with the text,
sequences come and go, a link becomes slow, and every time has noise and outliers. Step and draft times are
those of SmolLM2-135M and its EAGLE-3 drafter on CPU cores, or of a faster pair. `python -m experiments.planner
generate FOLDER` writes the traces; the tests generate the same ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from experiments.planner.trace import MAX_RIGHT, NO_SIBLING, Round, Trace, TraceInfo

_OUTLIER = 0.005  # share of steps that take twice as long
_SIBLING = 0.4
_FLAT_CURVE = ((1, 12_000.0), (8, 13_200.0), (16, 15_000.0), (64, 30_000.0), (512, 170_000.0))
_FULL_CURVE = ((1, 10_000.0), (4, 10_400.0), (16, 16_000.0), (64, 44_000.0), (512, 310_000.0))

Course = Callable[[float], float]
"""A quantity over the course of a trace, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class World:
    """What changes over a trace and how fast.

    Attributes:
        acceptance: of drafted tokens.
        load: running sequences, rounded.
        rtt_ms: round trip.
        period_ms: between rounds; about a plain step, so that no round is used twice.
    """

    placement: str
    step_us: tuple[tuple[int, float], ...]
    acceptance: Course
    load: Course
    rtt_ms: Course
    seconds: float
    period_ms: float
    draft_token_us: float = 900.0


def _levels(*values: float) -> Course:
    return lambda share: values[min(int(share * len(values)), len(values) - 1)]


def _wave(low: float, high: float, num_waves: float) -> Course:
    return lambda share: low + (high - low) * (0.5 - 0.5 * math.cos(2 * math.pi * num_waves * share))


WORLDS: Mapping[str, World] = {
    # Text that is easy to guess, then hard, then easy; one to four sequences; near.
    "drift": World(
        "separate", _FLAT_CURVE, _wave(0.88, 0.45, 1.5), _levels(1, 2, 4, 2, 1), _levels(0.8), 30.0, 12.0
    ),
    # From one sequence to 32 and back, beside the target: speculation stops paying on the way.
    "load": World(
        "colocated",
        _FULL_CURVE,
        _wave(0.8, 0.65, 2),
        _levels(1, 4, 16, 32, 32, 8, 2, 1),
        _levels(0.0),
        28.0,
        16.0,
    ),
    # The way becomes long and short again.
    "network": World(
        "separate", _FLAT_CURVE, _wave(0.8, 0.7, 3), _levels(1), _levels(0.5, 6.0, 25.0, 6.0, 0.5), 36.0, 12.0
    ),
    # A drafter that knows nothing of this text.
    "hopeless": World("separate", _FLAT_CURVE, _levels(0.08), _levels(2), _levels(2.0), 36.0, 13.0),
}


def generate(name: str, seed: int = 1, worlds: Mapping[str, World] = WORLDS) -> Trace:
    """One of some worlds as a trace."""
    world, source = worlds[name], random.Random(f"{name} {seed}")
    info = TraceInfo(
        name=name,
        origin=f"generated, not recorded: experiments.planner.generate, world {name!r}, seed {seed}",
        placement=world.placement,
        step_us=world.step_us,
        draft_base_us=400.0,
        draft_token_us=world.draft_token_us,
        draft_path_us=world.draft_token_us * 0.15,
    )

    def geometric(rate: float, most: int) -> int:
        count = 0
        while count < most and source.random() < rate:
            count += 1
        return count

    def noise(spread: float) -> float:
        return math.exp(source.gauss(0.0, spread))

    rounds: list[Round] = []
    for index in range(int(world.seconds * 1e3 / world.period_ms) + 1):
        t_ms = index * world.period_ms
        share = t_ms / (world.seconds * 1e3)
        rate = world.acceptance(share)
        load = max(1, round(world.load(share)))
        rounds.append(
            Round(
                t_ms * 1e-3,
                tuple(geometric(rate, MAX_RIGHT) for _ in range(load)),
                tuple(min(1 + geometric(1 - _SIBLING, NO_SIBLING), NO_SIBLING) for _ in range(load)),
                noise(0.03) * (2.0 if source.random() < _OUTLIER else 1.0),
                noise(0.05),
                world.rtt_ms(share) * 1e-3 * noise(0.2),
            )
        )
    return Trace(info, rounds)


def write_all(folder: Path, seed: int = 1) -> list[Path]:
    """Write all WORLDS into a folder; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name in WORLDS:
        path = folder / f"{name}.jsonl"
        generate(name, seed).write(path)
        files.append(path)
    return files
