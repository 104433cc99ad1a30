"""Calibration: on outcomes recorded from a real model and drafter, and on planted ones."""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from experiments.calibration.outcomes import Recording, held_out_errors, nodes_of
from paceline.scheduling.acceptance_regression import MAX_POSITIONS
from paceline.scheduling.calibration import CalibrationError, Calibrator, Node
from paceline.scheduling.calibration_temperatures import fit_temperatures, fresh_paths
from paceline.scheduling.reliability import Reliability

RECORDED = Path(__file__).parent / "outcomes.json"
"""SmolLM2-135M and its EAGLE-3 drafter, by `python -m experiments.calibration --outcomes`, a part of it;
log-probabilities are rounded. Held out there are whole prompts."""


@pytest.fixture(scope="module")
def recorded() -> dict[str, list[Recording]]:
    stored = json.loads(RECORDED.read_text())
    return {mode: [Recording.from_list(value) for value in by_prompt] for mode, by_prompt in stored.items()}


@pytest.mark.parametrize("mode", ["greedy", "coupled"])
def test_recorded_outcomes_are_calibrated_to_3_percent_on_prompts_not_seen(
    recorded: dict[str, list[Recording]], mode: str
) -> None:
    errors = held_out_errors(recorded[mode])
    assert errors.num_trials > 5000
    assert errors.token < 0.03
    assert errors.path < 0.03
    assert errors.token < errors.own
    assert errors.path < errors.own_path


@pytest.mark.parametrize("mode", ["greedy", "coupled"])
def test_it_is_calibrated_while_it_learns(recorded: dict[str, list[Recording]], mode: str) -> None:
    """Every confidence is given before its outcome is known, as in a verifier; the warm-up is left out."""
    trees = [tree for recording in recorded[mode] for tree in recording.trees]
    random.Random(1).shuffle(trees)
    calibrator = Calibrator()
    warm = CalibrationError(math.inf)
    for tree in trees:
        nodes = nodes_of(calibrator, tree)
        for outcome in calibrator.observe(nodes):
            if calibrator.token_error.count > 1000:
                warm.observe(outcome.calibrated, outcome.is_accepted)
    assert warm.count > 4000
    assert warm.value < 0.03
    assert calibrator.path_error.value < 0.03


def planted(rng: random.Random, calibrator: Calibrator, num_rounds: int, length: int = 4) -> None:
    """Chains of a drafter that is too sure: the log-odds of acceptance are half its own, less 0.2 a position."""
    for _ in range(num_rounds):
        nodes: list[Node] = []
        is_alive, path_acceptance = True, 1.0
        for position in range(length):
            z = rng.gauss(1.0, 2.0)
            log_prob = -math.log1p(math.exp(-z))
            path_acceptance *= calibrator.confidence(log_prob, position)
            is_alive = is_alive and rng.random() < 1 / (1 + math.exp(-(z / 2 - 0.2 * position)))
            nodes.append(Node(position - 1, log_prob, position, path_acceptance, is_alive))
        calibrator.observe(nodes)


def test_a_planted_law_is_found() -> None:
    calibrator = Calibrator()
    planted(random.Random(2), calibrator, 6000)
    for position in range(3):
        for z in (-2.0, 0.0, 2.0, 4.0):
            truth = 1 / (1 + math.exp(-(z / 2 - 0.2 * position)))
            log_prob = -math.log1p(math.exp(-z))
            assert calibrator.confidence(log_prob, position) == pytest.approx(truth, abs=0.06)
    assert calibrator.own_error.value > 0.08
    assert calibrator.token_error.value < 0.03


def test_a_drafter_that_changed_is_followed() -> None:
    rng = random.Random(3)
    calibrator = Calibrator(half_life=1000)
    planted(rng, calibrator, 2000)
    before = calibrator.confidence(-0.1, 0)
    for _ in range(3000):  # nothing is accepted any more
        calibrator.observe([Node(-1, -rng.random(), 0, calibrator.confidence(-0.1, 0), False)])
    assert before > 0.6
    assert calibrator.confidence(-0.1, 0) < 0.1


def test_before_anything_is_known_the_drafter_is_taken_at_its_word() -> None:
    calibrator = Calibrator()
    for log_prob in (0.0, -0.1, -3.0, -50.0):
        assert calibrator.confidence(log_prob, 3) == math.exp(log_prob)
    assert calibrator.temperatures == (1.0,) * MAX_POSITIONS


def test_a_likelier_token_is_never_taken_for_a_worse_one_and_any_number_gives_a_probability() -> None:
    calibrator = Calibrator()
    planted(random.Random(4), calibrator, 1000)
    for position in (0, 2, 15, 63):
        values = [calibrator.confidence(-step / 50, position) for step in range(1000, -1, -1)]
        assert all(later >= earlier - 1e-12 for earlier, later in pairwise(values))
        for odd in (0.0, 1e-4, -1e-9, -1e30, -math.inf, math.nan):
            assert 0.0 <= calibrator.confidence(odd, position) < 1.0


def test_what_lies_behind_a_rejection_is_no_trial_but_part_of_a_path() -> None:
    calibrator = Calibrator()
    outcomes = calibrator.observe(
        [
            Node(-1, -0.1, 0, 0.9, True),
            Node(-1, -3.0, 0, 0.05, False),
            Node(0, -0.5, 1, 0.45, False),
            Node(1, -0.2, 1, 0.04, False),
            Node(2, -0.2, 2, 0.36, False),
            Node(0, None, 0, 0.45, False),
        ]
    )
    assert [(o.position, round(o.calibrated, 6), o.is_accepted) for o in outcomes] == [
        *((0, 0.9, True), (0, 0.05, False), (1, 0.5, False)),
    ]
    assert calibrator.token_error.count == 3
    assert calibrator.path_error.count == 5


def test_a_temperature_is_found_where_products_along_paths_need_one() -> None:
    """Logits twice as sure as they should be at the second position, right at the first and third."""
    rng = random.Random(5)
    z = np.linspace(-10, 10, 41)
    logits = np.tile(z, (MAX_POSITIONS, 1))
    rounds = []
    for _ in range(4000):
        nodes, is_alive = [], True
        for position, temperature in enumerate((1.0, 2.0, 1.0)):
            odds = rng.gauss(2.0, 2.0)
            is_alive = is_alive and rng.random() < 1 / (1 + math.exp(-odds / temperature))
            log_prob = -math.log1p(math.exp(-odds))
            nodes.append(Node(position - 1, log_prob, position, 1.0, is_alive))
        rounds.append(nodes)
    temperatures = fit_temperatures([fresh_paths(nodes) for nodes in rounds], logits)
    assert temperatures[0] == pytest.approx(1.0, abs=0.15)
    assert temperatures[1] == pytest.approx(2.0, abs=0.35)
    assert temperatures[2] == pytest.approx(1.0, abs=0.35)
    assert (temperatures[3:] == 1).all()


def test_an_error_is_the_mean_gap_and_forgets() -> None:
    error = CalibrationError(half_life=100)
    assert error.value == 0
    for i in range(1000):
        error.observe(0.92, i % 2 == 0)
    assert error.value == pytest.approx(0.42, abs=0.01)
    for _ in range(100_000):
        error.observe(1.0, True)
    assert error.value < 1e-6
    assert error.count == 101_000


def test_a_table_gives_the_same_error() -> None:
    rng = random.Random(6)
    error, counts = CalibrationError(math.inf), []
    for _ in range(2000):
        confidence, accepted = rng.random(), rng.random() < 0.5
        error.observe(confidence, accepted)
        counts.append((rng.randrange(4), confidence, 1, int(accepted)))
    assert Reliability.of(counts).error == pytest.approx(error.value)
    again = Reliability.from_dict(json.loads(json.dumps(Reliability.of(counts).to_dict())))
    assert again == Reliability.of(counts)


@pytest.mark.parametrize(
    "cells",
    [
        [[0, 20, 1, 1, 1]],
        [[64, 0, 1, 1, 1]],
        [[0, 0, 1, 2, 0]],
        [[0, 0, 1, 1]],
        [[0, 0, math.nan, 1, 0]],
        [[0, 0, 0, 0, 0]],
    ],
)
def test_tables_that_cannot_be_are_refused(cells: list[list[float]]) -> None:
    with pytest.raises(ValueError):
        Reliability.from_dict({"count": 1, "cells": cells})
