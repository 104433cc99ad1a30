"""Closed forms against published tables, direct maximisation, simulation and enumeration."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from experiments import theory
from experiments.theory import CachePlace, CycleParams
from paceline.scheduling.outcomes import outcome_hit_rates

# Best speed over plain decoding @ whole length, for r = 0, .05, .2, .5, 1 and 2.
SYNCHRONOUS = {
    (0.7, 0.05): ("2.35@6", "2.27@6", "2.04@6", "1.70@6", "1.34@7", "0.94@8"),
    (0.8, 0.05): ("3.09@8", "2.99@8", "2.71@8", "2.29@9", "1.83@10", "1.31@12"),
    (0.8, 0.10): ("2.47@6", "2.39@6", "2.20@6", "1.89@7", "1.55@8", "1.14@9"),
    (0.9, 0.05): ("4.67@13", "4.54@14", "4.18@14", "3.62@16", "2.98@18", "2.23@20"),
}
# Speed over plain decoding, taking turns and with a drafter that never stops, for r = 0, .1, .5 and 1.
PIPELINED = {
    (0.7, 0.10): ((1.98, 2.03), (1.85, 1.92), (1.47, 1.78), (1.18, 1.51)),
    (0.8, 0.05): ((3.09, 3.17), (2.89, 2.98), (2.29, 2.61), (1.83, 2.03)),
    (0.8, 0.10): ((2.47, 2.67), (2.32, 2.56), (1.89, 2.29), (1.55, 1.95)),
    (0.8, 0.20): ((1.87, 2.18), (1.77, 2.07), (1.48, 1.81), (1.23, 1.70)),
    (0.9, 0.10): ((3.43, 4.11), (3.27, 3.97), (2.76, 3.53), (2.34, 3.05)),
}
ACCEPTANCE = st.floats(0.05, 0.95)


@pytest.mark.parametrize(
    ("acceptance", "draft_cost", "round_trip", "expected"),
    [
        (*pair, round_trip, expected)
        for pair, row in SYNCHRONOUS.items()
        for round_trip, expected in zip((0, 0.05, 0.2, 0.5, 1, 2), row, strict=True)
    ],
)
def test_best_synchronous_lengths_are_the_table(
    acceptance: float, draft_cost: float, round_trip: float, expected: str
) -> None:
    params = CycleParams(acceptance, draft_cost, round_trip)
    found = [dataclasses.replace(params, draft_length=length) for length in range(1, 65)]
    best = max(found, key=theory.synchronous_speedup)
    assert f"{theory.synchronous_speedup(best):.2f}@{best.draft_length}" == expected
    closed = theory.best_synchronous_length(acceptance, draft_cost, round_trip)
    assert best.draft_length in (math.floor(closed), math.ceil(closed))
    # Where even the best loses, nothing is drafted.
    chosen = theory.best_synchronous(params)
    assert chosen.draft_length == (best.draft_length if theory.synchronous_speedup(best) > 1 else 0)


@given(ACCEPTANCE, st.floats(0.001, 1), st.floats(0, 5))
def test_the_closed_form_is_where_the_derivative_vanishes(
    acceptance: float, draft_cost: float, round_trip: float
) -> None:
    length = theory.best_synchronous_length(acceptance, draft_cost, round_trip)

    def speedup(g: float) -> float:
        return (1 - acceptance ** (g + 1)) / (1 - acceptance) / (1 + draft_cost * g + round_trip)

    for other in (length * 0.98, length * 1.02 + 1e-3):
        assert speedup(length) >= speedup(other) - 1e-12


@given(ACCEPTANCE, st.floats(0.001, 1))
def test_without_a_network_speculation_gains_exactly_where_acceptance_exceeds_cost(
    acceptance: float, draft_cost: float
) -> None:
    assume(abs(acceptance - draft_cost) > 1e-9)
    params = CycleParams(acceptance, draft_cost)
    gain = theory.synchronous_speedup(theory.best_synchronous(params))
    assert (gain > 1) == (acceptance > draft_cost)
    assert theory.break_even_acceptance(params) == pytest.approx(min(draft_cost, 1), abs=1e-6)


def test_break_even_points() -> None:
    free = CycleParams(0.8, 0.0)
    assert theory.break_even_round_trip(free, 400) == pytest.approx(0.8 / 0.2)
    dear = CycleParams(0.8, 0.05)
    limit = theory.break_even_round_trip(dear)
    for round_trip, pays in ((limit * 0.999, True), (limit * 1.001, False)):
        best = theory.best_synchronous(dataclasses.replace(dear, round_trip=round_trip))
        assert (theory.synchronous_speedup(best) > 1) is pays
    there = theory.break_even_acceptance(dataclasses.replace(dear, round_trip=limit))
    assert there == pytest.approx(0.8, abs=1e-6)
    assert theory.break_even_acceptance(CycleParams(0.5, 2.0, 100.0)) == 1.0
    # Eight tokens that cost .04 more beside the target pay for a round trip of .32.
    limit = theory.break_even_remote_round_trip(8, 0.09, 0.05)
    assert limit == pytest.approx(0.32)
    beside = theory.synchronous_speedup(CycleParams(0.8, 0.09, draft_length=8))
    for round_trip, pays in ((limit * 0.99, True), (limit * 1.01, False)):
        elsewhere = theory.synchronous_speedup(CycleParams(0.8, 0.05, round_trip, 8))
        assert (elsewhere > beside) is pays


@given(ACCEPTANCE, st.floats(0, 1), st.integers(0, 40))
def test_no_chain_exceeds_its_limits(acceptance: float, draft_cost: float, length: int) -> None:
    tokens = theory.chain_tokens(acceptance, length)
    assert tokens == pytest.approx(sum(acceptance**k for k in range(length + 1)))
    assert tokens <= theory.chain_limit(acceptance)
    params = CycleParams(acceptance, draft_cost, draft_length=length)
    assert theory.synchronous_speedup(params) <= theory.replica_bound(params) * (1 + 1e-12)


def test_bound_with_replicas() -> None:
    assert theory.replica_bound(CycleParams(0.8, 0.05)) == pytest.approx(4.17, abs=0.005)
    assert theory.replica_bound(CycleParams(0.8, 0.10)) == pytest.approx(3.57, abs=0.005)
    assert theory.replicas_needed(0.05, 5) == 4
    assert theory.replicas_needed(0.1, 3) == 4
    with pytest.raises(ValueError):
        theory.replicas_needed(0.0, 3)


@pytest.mark.parametrize(
    ("acceptance", "draft_cost", "round_trip", "in_turn", "expected"),
    [
        (*pair, round_trip, *expected)
        for pair, row in PIPELINED.items()
        for round_trip, expected in zip((0, 0.1, 0.5, 1), row, strict=True)
    ],
)
def test_the_simulated_pipeline_is_the_table(
    acceptance: float, draft_cost: float, round_trip: float, in_turn: float, expected: float
) -> None:
    params = CycleParams(acceptance, draft_cost, round_trip)
    synchronous = theory.synchronous_speedup(theory.best_synchronous(params))
    assert synchronous == pytest.approx(in_turn, abs=0.0051)
    found = theory.best_pipelined(params, num_tokens=40_000, seed=3)
    assert found == pytest.approx(expected, rel=0.02)
    if round_trip >= 0.5:  # there the target never waits
        assert theory.simulate_pipelined(params, num_tokens=40_000, seed=3) == found


def test_a_pipeline_is_never_slower_than_plain_decoding() -> None:
    for acceptance, round_trip in itertools.product((0.0, 0.3), (0.0, 2.0, 50.0)):
        params = CycleParams(acceptance, 0.3, round_trip)
        assert theory.simulate_pipelined(params, num_tokens=4_000, has_bonus=True) >= 1 - 1e-9


def test_a_pipeline_that_hides_all_reaches_the_chain_limit() -> None:
    free = CycleParams(0.8, 1e-6)
    assert theory.simulate_pipelined(free, min_tokens=40, has_bonus=True) == pytest.approx(5.0, rel=0.02)


def test_the_simulation_depends_on_its_seed_alone() -> None:
    params = CycleParams(0.8, 0.1, 0.3)
    first, again, other = (theory.simulate_pipelined(params, num_tokens=2_000, seed=s) for s in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(("acceptance", "length", "cost", "trip"), [(0.8, 4, 0.1, 0.5), (0.6, 2, 0.7, 0.0)])
def test_the_renewal_form_is_a_mean_over_rounds(
    acceptance: float, length: int, cost: float, trip: float
) -> None:
    random_source = random.Random(5)
    tokens = time = 0.0
    for _ in range(100_000):
        right = next(k for k in itertools.count() if k == length or random_source.random() >= acceptance)
        is_whole = right == length
        tokens += length if is_whole else right + 1
        time += max(1, cost * length) + (0 if is_whole else trip + cost * length)
    params = CycleParams(acceptance, cost, trip, length)
    assert theory.pipelined_speedup(params) == pytest.approx(tokens / time, rel=0.01)


@pytest.mark.parametrize(
    ("place", "round_trip", "expected"),
    [
        (CachePlace.VERIFIER, 0.0, (3.82, 4.22, 4.46)),
        (CachePlace.VERIFIER, 0.5, (3.28, 3.87, 4.26)),
        (CachePlace.DRAFTER, 0.5, (2.72, 2.92, 3.03)),
    ],
)
def test_outcome_enumeration_is_the_table(
    place: CachePlace, round_trip: float, expected: tuple[float, ...]
) -> None:
    params = CycleParams(0.8, 0.05, round_trip)
    for hit_rate, speedup in zip((0.6, 0.8, 0.9), expected, strict=True):
        best = theory.best_outcome_length(params, hit_rate, max_length=12, place=place)
        assert theory.outcome_speedup(best, hit_rate, place=place) == pytest.approx(speedup, abs=0.006)


@given(ACCEPTANCE, st.floats(0, 0.5), st.floats(0, 3), st.integers(1, 12), st.floats(0, 1), st.floats(0, 2))
def test_enumeration_stays_within_its_bound(
    acceptance: float, cost: float, trip: float, length: int, hit_rate: float, build: float
) -> None:
    params = CycleParams(acceptance, cost, trip, length)
    synchronous = theory.synchronous_speedup(params)
    found = theory.outcome_speedup(params, hit_rate, build=build)
    assert found <= synchronous * theory.outcome_bound(params) * (1 + 1e-9)
    assert theory.outcome_speedup(params, 0.0, build=build) == pytest.approx(synchronous)
    if build + trip <= 1:
        assert found >= synchronous * (1 - 1e-9)
        perfect = theory.outcome_speedup(params, 1.0, build=build)
        assert perfect == pytest.approx(synchronous * theory.outcome_bound(params))


def test_paths_that_land_late_keep_the_target_waiting() -> None:
    """Validity: T_p + r <= v. Beyond it every hit pays the rest, wherever the time goes."""
    params = CycleParams(0.8, 0.05, 0.5, 6)
    in_time = theory.outcome_speedup(params, 1.0, build=0.5)
    assert in_time == theory.outcome_speedup(params, 1.0, build=0.0)
    late = theory.outcome_speedup(params, 1.0, build=0.9)
    assert late == pytest.approx(in_time / 1.4)


@given(
    st.lists(ACCEPTANCE, min_size=1, max_size=4),
    st.floats(0.05, 0.95),
    st.integers(0, 4),
    st.integers(1, 40),
)
def test_hit_rates_are_the_largest_probabilities_of_outcomes(
    acceptance: list[float], sibling: float, length: int, num_outcomes: int
) -> None:
    rates = [acceptance[min(i, len(acceptance) - 1)] for i in range(length + 1)]
    chances: list[float] = []
    for accepted in range(length + 1):
        reached = math.prod(rates[:accepted])
        others = reached * (1 - rates[accepted])
        chances += [others * sibling * (1 - sibling) ** choice for choice in range(60)]
        if accepted == length:
            chances.append(reached * rates[accepted])
    ranked = sorted(chances, reverse=True)[:num_outcomes]
    found = outcome_hit_rates(acceptance, sibling, length, num_outcomes)
    assert found == pytest.approx(tuple(itertools.accumulate(ranked)), abs=1e-12)
    assert found[-1] <= 1


def test_more_children_lift_the_limit() -> None:
    assert theory.children_acceptance(0.5, 3) == pytest.approx(0.875)
    assert theory.tree_limit(0.5, 3) == pytest.approx(8.0)
    assert theory.tree_limit(0.5, 1) == theory.chain_limit(0.5)


@given(st.lists(st.floats(0.01, 0.4), min_size=1, max_size=2), st.integers(0, 4))
def test_the_best_tree_is_the_best_of_all_trees(rates: list[float], num_nodes: int) -> None:
    paths = [path for depth in range(1, 5) for path in itertools.product(range(len(rates)), repeat=depth)]
    path_acceptance = {path: math.prod(rates[child] for child in path) for path in paths}

    def grown(tree: frozenset[tuple[int, ...]]) -> set[frozenset[tuple[int, ...]]]:
        return {tree | {path} for path in paths if path not in tree and (len(path) == 1 or path[:-1] in tree)}

    trees = {frozenset[tuple[int, ...]]()}
    for _ in range(num_nodes):
        trees = set().union(*(grown(tree) for tree in trees))
    best = max(theory.tree_tokens(path_acceptance[path] for path in tree) for tree in trees)
    assert theory.tree_tokens(theory.best_tree_path_acceptances(rates, num_nodes)) == pytest.approx(best)


def test_load_ends_speculation() -> None:
    def linear(rows: int) -> float:
        return 1 + 0.05 * (rows - 1)

    params = CycleParams(0.7, 0.0, draft_length=4, verify_cost=linear)
    last = theory.break_even_batch(params)
    assert theory.batch_speedup(params, last) > 1 >= theory.batch_speedup(params, last + 1)
    assert 1 < last < 100
    assert theory.break_even_batch(CycleParams(0.7, 0.0), max_sequences=50) == 50
    assert theory.break_even_batch(dataclasses.replace(params, verify_cost=float)) == 0


def test_throughput_counts_every_sequence() -> None:
    found = theory.throughput([[0.8, 0.6], [0.5]], [2, 0], lambda rows: 0.1 * rows)
    assert found == pytest.approx((2 + 1.4) / 0.4)


def test_capacity() -> None:
    assert theory.capacity_gain(CycleParams(0.8, 0.05, draft_length=7)) == pytest.approx(1.35)
    assert theory.capacity_gain(CycleParams(0.8, 0.10, draft_length=7)) == pytest.approx(1.70)
    gain = theory.gain_per_cost(CycleParams(0.8, 0.1, draft_length=7), price_ratio=0.2, drafter_fraction=0.5)
    assert gain == pytest.approx(1.7 / 1.1)


@pytest.mark.parametrize(
    "values", [(1.0, 0.1), (-0.1, 0.1), (0.5, -1.0), (0.5, math.nan), (0.5, 0.1, math.inf), (0.5, 0.1, 0, -1)]
)
def test_impossible_cycles_are_refused(values: tuple[float, ...]) -> None:
    with pytest.raises(ValueError):
        CycleParams(*values)  # type: ignore[arg-type]
