"""Policies from measurements: cold start, what pays, what does not, and versions."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.contract.policy import SpeculationPolicy
from paceline.methods.registry import METHODS
from paceline.scheduling.speed import TimedPass
from services.scheduler.measurements import (
    AcceptancePart,
    CurvePart,
    DraftTimePart,
    Measurements,
    NetworkPart,
)
from services.scheduler.planning import (
    Planner,
    PlanningLimits,
)
from services.scheduler.publication import is_change, next_version
from services.scheduler.subject import Subject
from services.scheduler.subject_state import SubjectState

LIMITS = PlanningLimits(
    max_draft_length=8,
    max_nodes_per_sequence=32,
    max_nodes_per_step=256,
    max_wait_s=0.05,
    margin=0.05,
    concurrent_slowdown=0.0,
    max_outcomes=0,
    outcome_cost=0.2,
    cold_draft_length=4,
    probe_interval_s=10.0,
    probe_duration_s=1.0,
)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def subject(placement: str = "separate", method: str = "eagle3") -> Subject:
    return Subject("ab12", "bfloat16", "cpu", method, placement)


def measured(
    *, rate: float = 0.8, step_us: int = 20_000, per_token_us: int = 1_000, rtt_us: int = 500, length: int = 4
) -> Measurements:
    """A target whose step hardly grows with its rows, and a drafter."""
    accepted, left = [], 1000.0
    for _ in range(length):
        left *= rate
        accepted.append(int(left))
    return Measurements(
        CurvePart.of([(rows, step_us + 100 * rows) for rows in (1, 2, 4, 8, 16)] * 8),
        AcceptancePart.of((1000,) * length, tuple(accepted)),
        DraftTimePart.of([(k, per_token_us * k) for k in (1, 2, 4)] * 8),
        NetworkPart.of([rtt_us] * 32),
    )


@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_cold_start_speculates_so_that_there_is_something_to_measure(placement: str) -> None:
    decision = Planner(subject(placement), LIMITS, Clock()).decide(Measurements(), 0)
    assert decision.draft_length == 4
    assert "cold start" in decision.reason
    assert (decision.wait_budget_us > 0) == (placement == "separate")


@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_no_more_is_asked_for_than_a_draft_can_have(placement: str) -> None:
    free = Planner(subject(placement, "medusa1"), LIMITS, Clock()).decide(measured(rate=0.95), 1)
    bound = Planner(subject(placement, "medusa1"), LIMITS, Clock()).decide(
        measured(rate=0.95), 1, longest_draft=3
    )
    assert free.draft_length > bound.draft_length == 3
    cold = Planner(subject(placement, "medusa1"), LIMITS, Clock()).decide(Measurements(), 0, longest_draft=3)
    assert cold.draft_length == 3


@pytest.mark.parametrize(("method", "placement"), [("", "none"), ("", "colocated"), ("eagle3", "none")])
def test_without_a_drafter_there_is_nothing_to_decide(method: str, placement: str) -> None:
    decision = Planner(subject(placement, method), LIMITS, Clock()).decide(measured(), 1)
    assert decision.draft_length == 0
    assert decision.expected_speedup == 1.0


@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_a_good_drafter_is_used(placement: str) -> None:
    decision = Planner(subject(placement), LIMITS, Clock()).decide(measured(), 1)
    assert decision.draft_length >= 4
    assert decision.expected_speedup > 1.5
    assert "speedup" in decision.reason


def test_a_drafter_that_is_always_wrong_is_turned_off_and_probed_later() -> None:
    clock = Clock()
    planner = Planner(subject("colocated"), LIMITS, clock)
    useless = measured(rate=0.02)
    assert planner.decide(useless, 1).draft_length == 0
    clock.now = 11.0  # the interval has passed, but a trial would cost a sixth of its second
    assert planner.decide(useless, 1).draft_length == 0
    clock.now = 41.0
    probe = planner.decide(useless, 1)
    assert probe.draft_length > 0
    assert probe.reason.startswith("probe")
    clock.now = 42.5
    assert planner.decide(useless, 1).draft_length == 0


def test_a_slow_network_turns_speculation_off_or_stops_the_wait() -> None:
    near = Planner(subject(), LIMITS, Clock()).decide(measured(rtt_us=500), 1)
    far = Planner(subject(), LIMITS, Clock()).decide(measured(rtt_us=400_000), 1)
    assert near.expected_speedup > far.expected_speedup
    assert far.wait_budget_us <= LIMITS.max_wait_s * 1e6


def test_the_wait_budget_covers_draft_and_round_trip() -> None:
    decision = Planner(subject(), LIMITS, Clock()).decide(measured(rtt_us=2_000), 1)
    assert decision.wait_budget_us >= 1_000 * decision.draft_length


def test_outcomes_are_drafted_past_where_the_step_leaves_time_for_it() -> None:
    may = dataclasses.replace(LIMITS, max_outcomes=8)
    slow_target = measured(step_us=40_000, rtt_us=10_000)
    without = Planner(subject(method="independent"), LIMITS, Clock()).decide(slow_target, 1)
    past = Planner(subject(method="independent"), may, Clock()).decide(slow_target, 1)
    assert (without.num_outcomes, past.draft_ahead > 0) == (0, True)
    assert past.num_outcomes > 1
    assert past.expected_speedup > 1.1 * without.expected_speedup
    assert "outcomes" in past.reason
    # One after another they would not be done before the step is.
    fast_target = measured(step_us=4_000, rtt_us=3_000)
    dear = dataclasses.replace(may, outcome_cost=1.0)
    fewer = Planner(subject(method="independent"), dear, Clock()).decide(fast_target, 1)
    assert fewer.num_outcomes < past.num_outcomes
    assert Planner(subject("colocated"), may, Clock()).decide(slow_target, 1).num_outcomes == 0


def test_lengths_grow_with_the_round_trip_and_shrink_with_load() -> None:
    """The two pull in opposite directions: a long way is worth a longer draft, a full step is not."""
    far = dataclasses.replace(LIMITS, max_draft_length=24, max_wait_s=0.5)
    policies = [
        Planner(subject(), far, Clock()).decide(measured(rtt_us=rtt_us), 1)
        for rtt_us in (100, 16_000, 18_000)
    ]
    assert all(
        policy.wait_budget_us for policy in policies
    )  # drafts that steps do not wait for must outlast whole steps
    assert [policy.draft_length for policy in policies] == [8, 9, 10]
    loaded = dataclasses.replace(
        measured(), curve=CurvePart.of([(rows, 10_000 + 400 * rows) for rows in (1, 8, 32, 128, 512)] * 8)
    )
    load_lengths = [
        Planner(subject("colocated"), LIMITS, Clock()).decide(loaded, load).draft_length
        for load in (1, 4, 16, 64)
    ]
    assert load_lengths == sorted(load_lengths, reverse=True)
    assert load_lengths[0] > 3
    assert load_lengths[-1] == 0


def test_speculation_comes_back_when_the_load_goes() -> None:
    """Off under load, tried now and then, and back at once when it pays again; what is off asks for nothing."""
    clock = Clock()
    planner = Planner(subject("colocated"), LIMITS, clock)
    loaded = dataclasses.replace(
        measured(), curve=CurvePart.of([(rows, 10_000 + 400 * rows) for rows in (1, 8, 32, 128, 512)] * 8)
    )
    assert planner.decide(loaded, 1).draft_length > 0
    off = planner.decide(loaded, 64)
    assert (off.draft_length, off.wait_budget_us, off.draft_ahead) == (0, 0, 0)
    assert (off.max_nodes_per_step, off.expected_speedup) == (0, 1.0)
    decisions = []
    for _ in range(700):
        clock.now += 0.1
        decisions.append(planner.decide(loaded, 64))
    trials = [decision for decision in decisions if decision.draft_length]
    assert 0 < len(trials) <= 70  # one second in eleven at most
    assert sum(max(0.0, 1 - trial.expected_speedup) for trial in trials) <= 0.005 * len(decisions)
    assert planner.decide(loaded, 1).draft_length > 0  # the model alone may turn it on again


def test_one_pass_drafters_do_not_pay_per_token() -> None:
    one_pass = Measurements(
        measured().curve,
        measured().acceptance,
        DraftTimePart.of([(1, 9_000)] * 32),
        measured().network,
    )
    chain = Planner(subject("colocated", "eagle3"), LIMITS, Clock()).decide(one_pass, 1)
    block = Planner(subject("colocated", "dflash"), LIMITS, Clock()).decide(one_pass, 1)
    assert block.draft_length == 8
    assert block.expected_speedup > chain.expected_speedup


def test_the_step_budget_changes_only_with_powers_of_two() -> None:
    budgets = {
        Planner(subject(), LIMITS, Clock()).decide(Measurements(), n).max_nodes_per_step for n in range(9)
    }
    assert budgets == {48}
    assert Planner(subject(), LIMITS, Clock()).decide(Measurements(), 9).max_nodes_per_step == 96


def test_nothing_is_drafted_ahead_in_a_cold_start_on_shared_memory() -> None:
    """The steps measured then would be those of a target that is slowed down."""
    shared = dataclasses.replace(LIMITS, concurrent_slowdown=0.3)
    for limits, ahead in ((LIMITS, 4), (shared, 0)):
        policy = Planner(subject(), limits, Clock()).decide(Measurements(), 1)
        assert (policy.draft_length, policy.draft_ahead) == (4, ahead)


POLICY = SpeculationPolicy(
    version=5,
    draft_length=4,
    max_nodes_per_sequence=8,
    max_nodes_per_step=64,
    wait_budget_us=1000,
    draft_ahead=4,
    num_outcomes=2,
    expected_speedup=1.5,
    reason="why",
)


def test_published_policy_round_trips_and_is_checked() -> None:
    assert SpeculationPolicy.from_dict(POLICY.to_dict()) == POLICY
    for name, value in (
        ("version", -1),
        ("version", True),
        ("draft_length", 65),
        ("wait_budget_us", 1.5),
        ("expected_speedup", float("nan")),
        ("reason", None),
    ):
        with pytest.raises(ValueError):
            SpeculationPolicy.from_dict({**POLICY.to_dict(), name: value})
    with pytest.raises(ValueError):
        SpeculationPolicy.from_dict({})


def test_what_counts_as_a_change() -> None:
    assert not is_change(dataclasses.replace(POLICY, version=9, reason="", expected_speedup=9.0), POLICY)
    assert not is_change(dataclasses.replace(POLICY, wait_budget_us=1100), POLICY)
    for change in (
        {"draft_length": 3},
        {"wait_budget_us": 2000},
        {"wait_budget_us": 0},
        {"draft_ahead": 0},
        {"num_outcomes": 0},
    ):
        assert is_change(dataclasses.replace(POLICY, **change), POLICY)


def test_versions_rise_whatever_the_clock_does() -> None:
    assert next_version(1_000, 0) == 1_000
    assert next_version(1_000, 1_000) == 1_001
    assert next_version(500, 1_001) == 1_002


def passes(version: int, num_tokens: int, count: int = 200, num_cache_hits: int = 0) -> list[TimedPass]:
    """Of a policy, 20 ms a plain step (see `measured`) and 30 a drafted one."""
    return [TimedPass(version, 5, 1, num_tokens, num_cache_hits, True, 22e-3, 8e-3, 0.0)] * count


def test_what_is_a_loss_is_turned_off_until_a_trial_proves_otherwise() -> None:
    clock, good = Clock(), measured()
    planner = Planner(subject(), LIMITS, clock)
    assert planner.decide(good, 1).draft_length > 0
    assert planner.decide(good, 1, passes(7, 1, count=10), 7).draft_length > 0  # too few to say
    off = planner.decide(good, 1, passes(7, 1), 7)
    assert off.draft_length == 0
    assert "measured" in off.reason
    clock.now += 5
    assert planner.decide(good, 1).draft_length == 0  # the model alone does not turn it on again
    clock.now += 55
    assert planner.decide(good, 1).draft_length == 0  # a second that loses a third is paid for by a minute
    clock.now += 7
    assert planner.decide(good, 1).draft_length > 0
    clock.now += 1.1
    assert planner.decide(good, 1, passes(8, 3), 8).draft_length > 0
    clock.now += 20
    assert planner.decide(good, 1, passes(8, 2), 8).draft_length > 0  # a gain, if a smaller one


def test_outcomes_are_chosen_by_what_a_method_can_make_of_them() -> None:
    may = dataclasses.replace(LIMITS, max_outcomes=8, outcome_cost=0.0)
    slow_target = measured(step_us=60_000, rtt_us=30_000)

    def decided(method: str) -> SpeculationPolicy:
        return Planner(subject(method=method), may, Clock()).decide(slow_target, 1)

    tokens_alone, features = decided("independent"), decided("eagle3")
    assert tokens_alone.num_outcomes > 0
    assert features.num_outcomes > 0
    assert features.expected_speedup < tokens_alone.expected_speedup  # it goes on from its own outputs
    for method in ("medusa1", "pard1", "dflash"):
        assert decided(method).num_outcomes == 0


def test_measured_hits_change_what_is_enumerated() -> None:
    may = dataclasses.replace(LIMITS, max_outcomes=8, outcome_cost=0.0)
    planner = Planner(subject(), may, Clock())
    slow_target = measured(step_us=60_000, rtt_us=30_000)
    believed = planner.decide(slow_target, 1)
    assert believed.num_outcomes > 0
    never = planner.decide(slow_target, 1, passes(3, 8), 3)
    assert planner.measured_speed is not None
    assert planner.measured_speed.hit_rate == 0
    assert never.expected_speedup < believed.expected_speedup


def waiting_passes(version: int, wait_us: int, count: int = 200) -> list[TimedPass]:
    """Passes of a good draft, each after such a wait."""
    return [TimedPass(version, 5, 1, 3, 0, True, 20.5e-3, wait_us * 1e-6, 1e-3)] * count


def test_waits_that_were_measured_are_believed() -> None:
    planner = Planner(subject(), LIMITS, Clock())
    slow = measured(rtt_us=5_000)
    modelled = planner.decide(slow, 1)
    assert modelled.wait_budget_us > 0
    wait_us = 5_000 + 1_000 * modelled.draft_length
    shorter = planner.decide(slow, 1, waiting_passes(1, wait_us * 3 // 4), 1)
    assert shorter.expected_speedup > modelled.expected_speedup
    assert shorter.wait_budget_us >= modelled.wait_budget_us  # what overlaps today may not tomorrow
    # It is known without passes as well, and for another network.
    assert planner.decide(slow, 1, [], 1).expected_speedup == pytest.approx(shorter.expected_speedup)
    far = dataclasses.replace(slow, network=NetworkPart.of([40_000] * 32))
    unlearned = Planner(subject(), LIMITS, Clock()).decide(far, 1)
    assert planner.decide(far, 1, [], 1).expected_speedup < unlearned.expected_speedup * 1.15


def test_a_wait_is_at_least_half_of_what_it_is_made_of() -> None:
    planner = Planner(subject(), LIMITS, Clock())
    slow = measured(rtt_us=5_000)
    assert planner.decide(slow, 1).wait_budget_us > 0
    half = planner.decide(slow, 1, waiting_passes(1, 6_500), 1).expected_speedup
    for wait_us in (3_000, 200):
        other = Planner(subject(), LIMITS, Clock())
        other.decide(slow, 1)
        assert other.decide(slow, 1, waiting_passes(1, wait_us), 1).expected_speedup <= half * 1.01


def test_what_was_hidden_of_a_long_wait_does_not_hide_a_short_one() -> None:
    """Learned under load and on a slow network; then both are gone, and steps wait as before."""
    planner = Planner(subject(), LIMITS, Clock())
    heavy = measured(per_token_us=2_000, rtt_us=5_000)
    length = planner.decide(heavy, 1).draft_length
    planner.decide(heavy, 1, waiting_passes(1, (5_000 + 2_000 * length) // 2), 1)
    light = measured(per_token_us=400, rtt_us=500)
    fresh = Planner(subject(), LIMITS, Clock()).decide(light, 1)
    known = planner.decide(light, 1, [], 2)
    assert known.wait_budget_us == fresh.wait_budget_us > 0
    assert known.draft_length == fresh.draft_length


def test_waits_for_the_rest_of_a_draft_and_old_ones_teach_nothing() -> None:
    planner = Planner(subject(), LIMITS, Clock())
    slow = measured(rtt_us=5_000)
    expected = planner.decide(slow, 1).expected_speedup
    none = [dataclasses.replace(one, wait_s=5e-6) for one in waiting_passes(1, 0)]
    assert planner.decide(slow, 1, none, 1).expected_speedup == pytest.approx(expected)
    few = waiting_passes(1, 6_500, count=4)
    assert planner.decide(slow, 1, few, 1).expected_speedup == pytest.approx(expected)


def test_a_longer_wait_than_modelled_does_not_lengthen_the_model() -> None:
    """Such waits ran out of their budget: the measured speed shows that."""
    planner = Planner(subject(), LIMITS, Clock())
    slow = measured(rtt_us=5_000)
    expected = planner.decide(slow, 1).expected_speedup
    assert planner.decide(slow, 1, waiting_passes(1, 25_000), 1).expected_speedup == pytest.approx(expected)


def test_a_wait_at_the_drafter_is_part_of_the_wait_for_a_draft() -> None:
    near = measured(rtt_us=500)
    busy = dataclasses.replace(near, network=NetworkPart.of([500] * 32, [9_000] * 32))
    free = Planner(subject(), LIMITS, Clock()).decide(near, 1)
    queued = Planner(subject(), LIMITS, Clock()).decide(busy, 1)
    assert free.wait_budget_us > 0
    assert queued.wait_budget_us == 0 or queued.wait_budget_us >= free.wait_budget_us + 9_000
    assert queued.expected_speedup < free.expected_speedup - 0.1


def loaded(*rounds: tuple[int, int, int]) -> Measurements:
    """The usual target, and rounds of (draft steps, microseconds, sequences)."""
    return dataclasses.replace(measured(), draft_time=DraftTimePart.of([*rounds] * 8))


ALONE = [(k, 750 * k, 1) for k in (1, 2, 4)]
CROWDED = [(k, 6_000 * k, 32) for k in (1, 2, 4)]


def test_draft_time_is_that_of_the_present_load() -> None:
    """Whatever has been measured most: what was drafted alone says nothing of rounds of 32."""

    def expected(measurements: Measurements, load: int, **known: float) -> float:
        return Planner(subject(), LIMITS, Clock()).decide(measurements, load, **known).expected_speedup

    both = loaded(*ALONE, *ALONE, *CROWDED, *CROWDED)
    assert expected(both, 32) == pytest.approx(expected(loaded(*CROWDED), 32), rel=0.1)
    assert expected(both, 1) == pytest.approx(expected(loaded(*ALONE), 1), rel=0.05)
    # Of 32 that are spread over 32 drafters each drafts for one; of one whose drafter serves 32 targets, for
    # all.
    assert expected(both, 32, round_fraction=1 / 32) > 1.2 * expected(both, 32)
    assert expected(both, 1, round_fraction=32.0) < 0.9 * expected(both, 1)


def test_a_block_takes_longer_for_more_sequences_whatever_its_length() -> None:
    def expected(load: int) -> float:
        rounds = [(k, 2_000, 1) for k in (2, 4, 7)] + [(k, 20_000, 32) for k in (2, 4, 7)]
        return (
            Planner(subject(method="dflash"), LIMITS, Clock()).decide(loaded(*rounds), load).expected_speedup
        )

    free = Planner(subject(method="dflash"), LIMITS, Clock()).decide(loaded((4, 2_000, 1)), 1)
    assert expected(1) == pytest.approx(free.expected_speedup, rel=0.02)
    assert expected(32) < 0.85 * expected(1)


def test_load_is_a_target_s_and_rounds_are_held_against_it() -> None:
    state = SubjectState(subject(), Planner(subject(), LIMITS, Clock()))
    assert state.sequences_per_target == 0
    state.load = {"one": 8, "two": 8, "three": 0, "four": 7}
    assert state.num_running_sequences == 23
    assert state.sequences_per_target == 8
    for _ in range(400):  # four drafters share out what a target runs
        state.take(Measurements(draft_time=DraftTimePart.of([(4, 900, 2)])), num_sequences=8)
    assert state.round_fraction == pytest.approx(0.25, rel=0.05)
    state.take(Measurements(), num_sequences=1)  # nothing was drafted
    state.take(Measurements(draft_time=DraftTimePart.of([(4, 900, 2)])))  # nothing runs any more
    assert state.round_fraction == pytest.approx(0.25, rel=0.05)


def test_a_cold_start_s_waits_are_known_to_the_first_plan() -> None:
    """Else a drafter that gains is first turned off for a wait that nobody has."""
    limits = dataclasses.replace(LIMITS, concurrent_slowdown=0.2)
    slow = measured(rtt_us=14_000)

    def first_plan(early: list[TimedPass]) -> SpeculationPolicy:
        planner = Planner(subject(), limits, Clock())
        cold = planner.decide(Measurements(), 1)
        assert (cold.draft_length, cold.draft_ahead) == (4, 0)
        assert planner.decide(Measurements(), 1, early, 7).reason.startswith("cold start")
        return planner.decide(slow, 1, [], 7)

    assert first_plan([]).expected_speedup < first_plan(waiting_passes(7, 9_000)).expected_speedup
    # Passes of before the cold policy was in force teach nothing.
    assert first_plan(waiting_passes(6, 9_000)).expected_speedup == pytest.approx(
        first_plan([]).expected_speedup
    )


def test_every_method_is_known_by_what_it_makes_of_outcomes() -> None:
    """A method that is in none of these would pass for one that reads tokens alone."""
    reads_tokens_alone = {"independent"}
    one_pass = {name for name, method in METHODS.items() if method.is_one_pass}
    loses = {name for name, method in METHODS.items() if method.ahead_fraction < 1}
    assert set(METHODS) == reads_tokens_alone | one_pass | loses
    assert not one_pass & loses
