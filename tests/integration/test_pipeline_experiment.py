"""The pipeline experiment through real processes: dials, link and step clock do what they say, and texts stay."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import psutil
import pytest

from experiments.dials.dials import Dials
from experiments.dials.step_clock import StretchCurve
from experiments.pipeline.cell import Cell, Cycle
from experiments.pipeline.laboratory import Laboratory, laboratory
from experiments.pipeline.measure import Arm, Lengths, arms_of, figures_of, parse_cycles, run_rounds, shape_of
from experiments.pipeline.prediction import expected_tokens, predicted

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
STEP_MS = 60.0
"""Long beside what a busy machine adds to a round."""


def point(acceptance: float, round_trip_ms: float, num_sequences: int = 1) -> Cell:
    return Cell(
        Dials(acceptance=acceptance, draft_ms=3.0, bonus_hit_rate=0.8),
        round_trip_ms,
        StretchCurve.parse(str(STEP_MS)),
        num_sequences,
    )


@pytest.fixture(scope="module")
def up() -> Iterator[Laboratory]:
    """One laboratory; afterwards nothing of it is left."""
    family = {child.pid for child in psutil.Process().children(recursive=True)}
    with laboratory(f"{STEP_MS:g}", max_sequences=3, max_tokens=64) as made:
        yield made
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= family
    assert not made.directory.exists()


def test_cycles_keep_the_text_and_come_near_the_theory(up: Laboratory) -> None:
    arms = arms_of(
        [point(0.8, 30.0)],
        parse_cycles("synchronous,ahead,enumerate", Lengths(ahead=4, past=4, outcomes=4)),
    )
    run_rounds(up, arms, num_rounds=1, num_tokens=64, num_plain_tokens=12, seed=3, progress=lambda text: None)
    plain, synchronous, ahead, enumerated = figures_of(arms)
    assert all(arm["identical"] for arm in (plain, synchronous, ahead, enumerated))
    # Time, not luck: what a pass lasts follows from the dials, and a busy machine only adds to it.
    assert STEP_MS <= plain["ms_per_pass"] < 1.25 * STEP_MS
    round_ms = STEP_MS + 30.0 + 3.0 * synchronous["draft_length"]
    assert round_ms <= synchronous["ms_per_pass"] < 1.25 * round_ms
    assert synchronous["speedup"] > 1.2
    assert ahead["speedup"] > 1.0
    assert ahead["bubble"] < 0.2 < synchronous["bubble"]
    assert synchronous["bytes_per_token"] > 20
    # A hit waits for nothing; of the outcomes drafted past, seven in ten should come about.
    assert synchronous["at_once"] < 0.2
    assert enumerated["at_once"] > 0.3
    assert enumerated["ms_per_pass"] < synchronous["ms_per_pass"]


def test_a_drafter_that_is_always_right_gains_its_whole_length(up: Laboratory) -> None:
    cell = point(1.0, 0.0)
    shape = shape_of(Cycle.SYNCHRONOUS, cell, Lengths(synchronous=7))
    arm = Arm(cell, Cycle.SYNCHRONOUS, shape)
    up.set(cell, shape, seed=0)
    arm.run(up, 60)
    assert all(sample.is_identical for sample in arm.samples)
    inner = arm.samples[0].arrivals[1:-1]
    gained = {later - earlier for (_, earlier), (_, later) in pairwise(inner)}
    assert gained == {8}
    assert expected_tokens(1.0, 7) == 8
    assert predicted(Cycle.SYNCHRONOUS, cell, shape) == pytest.approx(8 / (1 + 7 * 3 / STEP_MS))


def test_several_at_once_are_drafted_for_together(up: Laboratory) -> None:
    cell = point(0.9, 10.0, num_sequences=3)
    arms = arms_of([cell], parse_cycles("synchronous:6", Lengths()))
    run_rounds(up, arms, num_rounds=1, num_tokens=40, num_plain_tokens=10, seed=0, progress=lambda text: None)
    plain, synchronous = figures_of(arms)
    assert plain["identical"]
    assert synchronous["identical"]
    assert plain["tokens_per_s"] > 2.4 * 1e3 / (1.25 * STEP_MS)
    assert synchronous["speedup"] > 1.2


def test_the_scheduler_decides_where_it_is_asked_to(up: Laboratory) -> None:
    """After fixed cycles, and before them: a fixed one teaches it nothing and is not changed by it."""
    arms = arms_of([point(0.9, 10.0)], parse_cycles("planned,synchronous:2", Lengths()))
    run_rounds(up, arms, num_rounds=1, num_tokens=64, num_plain_tokens=10, seed=0, progress=lambda text: None)
    _, planned, synchronous = figures_of(arms)
    assert planned["identical"]
    assert synchronous["identical"]
    assert planned["draft_length"] == 0
    assert (
        planned["tokens_per_pass"] > 1.0
    )  # it drafted, and of its own accord: the last file before it named plain steps
    assert planned["over_best_fixed"] > 0
    assert synchronous["tokens_per_pass"] <= 3
