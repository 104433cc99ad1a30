"""Policies over time under a clock that the test turns."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from paceline.scheduling import DrafterPlacement, PlanInputs, PolicyMode, PolicyState


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def flat(_: int) -> float:
    return 1.0


GOOD = PlanInputs(DrafterPlacement.COLOCATED, (0.8,), flat, lambda k: 0.05 * k)
BAD = dataclasses.replace(GOOD, acceptance=(0.01,))
# One drafted token at rate a and no cost brings 1 + a.
EDGE = dataclasses.replace(GOOD, acceptance=(0.07, 0.0), draft_time=lambda k: 0.0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def state(clock: Clock) -> PolicyState:
    return PolicyState(
        clock, hysteresis=0.05, probe_interval_s=10, probe_duration_s=1, probe_length=3, max_probe_loss=0.1
    )


def test_a_good_pair_speculates_at_once_and_stays(state: PolicyState) -> None:
    assert state.current.version == 0
    first = state.decide(GOOD)
    assert (first.version, first.draft_length) == (1, 8)
    assert state.decide(GOOD) is first


def test_small_improvements_do_not_change_the_length(state: PolicyState) -> None:
    state.decide(dataclasses.replace(GOOD, max_draft_length=7))
    assert state.decide(GOOD).draft_length == 7
    assert state.decide(dataclasses.replace(GOOD, acceptance=(0.3,))).draft_length < 7
    assert state.current.version == 2


def test_a_length_that_is_no_longer_allowed_is_given_up(state: PolicyState) -> None:
    state.decide(GOOD)
    assert state.decide(dataclasses.replace(GOOD, max_draft_length=2)).draft_length == 2


def test_what_does_not_pay_is_turned_off_with_hysteresis(state: PolicyState) -> None:
    assert state.decide(EDGE).draft_length  # 1.07 is above 1.05
    off = state.decide(BAD)
    assert not off.draft_length
    assert "off" in off.reason
    assert not state.decide(EDGE).draft_length  # 1.07 is below 1.10
    assert state.decide(GOOD).draft_length


def test_speculation_is_tried_again(state: PolicyState, clock: Clock) -> None:
    state.decide(BAD)
    clock.now_s = 9.9
    assert state.decide(BAD).draft_length == 0
    clock.now_s = 10.0
    probe = state.decide(BAD)
    assert (probe.draft_length, state.mode) == (3, PolicyMode.PROBING)
    clock.now_s = 10.9
    assert state.decide(BAD) is probe
    clock.now_s = 11.0
    assert state.decide(BAD).draft_length == 0
    clock.now_s = 21.0
    assert state.decide(BAD).draft_length == 3
    clock.now_s = 22.0
    assert state.decide(GOOD).draft_length == 8  # the probe showed that acceptance is back
    assert state.current.version == 5  # off, probe, off, probe, on


def test_probes_cost_no_more_than_their_fraction(clock: Clock) -> None:
    """Three drafted tokens that are never right make a step 1.15 times as long."""
    state = PolicyState(clock, probe_interval_s=10, probe_duration_s=1, probe_length=3, max_probe_loss=0.005)
    hopeless = dataclasses.replace(GOOD, acceptance=(0.0,))
    state.decide(hopeless)
    plain_s = probing_s = 0.0
    while clock.now_s < 1000:
        clock.now_s += 0.5
        if state.decide(hopeless).draft_length:
            probing_s += 0.5
        else:
            plain_s += 0.5
    assert probing_s >= 8
    lost = probing_s * (1 - 1 / 1.15)
    assert lost / (plain_s + probing_s) < 0.006
    # A probe that is expected to cost nothing only waits for its interval.
    cheap = PolicyState(clock, probe_interval_s=10, probe_duration_s=1, probe_length=1, max_probe_loss=1e-9)
    edge = dataclasses.replace(EDGE, acceptance=(0.04, 0.0))
    cheap.decide(edge)
    clock.now_s += 10
    assert cheap.decide(edge).draft_length


def test_a_measurement_overrules_the_model_until_another_one(state: PolicyState, clock: Clock) -> None:
    state.decide(GOOD)
    off = state.decide(GOOD, measured_speedup=0.98)
    assert not off.draft_length
    assert "measured" in off.reason
    assert not state.decide(GOOD).draft_length  # the model alone is not believed now
    clock.now_s = 10.0
    assert state.decide(GOOD).draft_length == 8  # what the model would choose is what is tried
    clock.now_s = 11.0
    assert not state.decide(GOOD, measured_speedup=1.02).draft_length
    clock.now_s = 31.0
    state.decide(GOOD)
    clock.now_s = 32.0
    assert state.decide(GOOD, measured_speedup=1.8).draft_length == 8
    assert state.mode is PolicyMode.ON


def test_probes_of_what_the_model_promises_in_vain_are_paid_for(clock: Clock) -> None:
    """The model expects 2.4, every measurement says 0.8: by the model's word each probe would be free."""
    state = PolicyState(clock)
    probes = run(state, clock, 2000.0, GOOD, measured_speedup=0.8)
    pauses = [later - earlier for earlier, later in itertools.pairwise(probes)]
    assert all(pause >= 0.2 / 0.005 for pause in pauses)
    assert len(probes) * 1.0 * 0.2 / 2000.0 <= 0.005
    assert pauses[-1] == pytest.approx(160.0 + 1.0, abs=1.0)  # doubled until then
    assert pauses[1:] == sorted(pauses[1:])


def test_a_probe_that_loses_ends_at_once(state: PolicyState, clock: Clock) -> None:
    state.decide(BAD)
    clock.now_s = 10.0
    assert state.decide(BAD).draft_length
    clock.now_s = 10.5
    assert state.decide(BAD, measured_speedup=1.01).draft_length  # may still turn out well
    assert not state.decide(BAD, measured_speedup=0.99).draft_length


def test_pauses_are_short_again_where_more_is_expected_than_was_refuted(clock: Clock) -> None:
    some = dataclasses.replace(GOOD, acceptance=(0.3, 0.0))
    state = PolicyState(clock)
    probes = run(state, clock, 600.0, some, measured_speedup=0.99)
    assert 3 < len(probes) < 8
    clock.now_s = probes[-1] + 15.0
    assert state.mode is PolicyMode.OFF
    assert not state.decide(some).draft_length
    assert state.decide(GOOD).draft_length  # a probe: the model is not trusted, but it says something new
    assert state.mode is PolicyMode.PROBING


def test_a_probe_as_slow_as_the_model_says_does_not_discredit_it(clock: Clock) -> None:
    """Six steps of round trip: a probe runs beside plain steps, and brings nothing. Then the round trip is short."""
    far = dataclasses.replace(GOOD, placement=DrafterPlacement.SEPARATE, acceptance=(0.6,), rtt_s=6.0)
    near = dataclasses.replace(far, rtt_s=0.1)
    state = PolicyState(clock)
    assert not state.decide(far).draft_length
    clock.now_s = 20.0
    probe = state.decide(far)
    assert probe.draft_length
    assert probe.wait_budget_us == 0  # waiting would cost two thirds of the time
    clock.now_s = 21.0
    assert not state.decide(far, measured_speedup=0.99).draft_length
    assert state.decide(near).draft_length
    assert state.mode is PolicyMode.ON


def run(
    state: PolicyState, clock: Clock, until_s: float, inputs: PlanInputs, measured_speedup: float
) -> list[float]:
    """Decides twice a second, with a measurement a second after speculation began; when probes began."""
    probes: list[float] = []
    began_s: float | None = None
    while clock.now_s < until_s:
        if not state.current.draft_length:
            began_s = None
        elif began_s is None:
            began_s = clock.now_s - 0.5
        is_measured = began_s is not None and clock.now_s - began_s >= 1.0
        was_off = state.mode is PolicyMode.OFF
        state.decide(inputs, measured_speedup if is_measured else None)
        if was_off and state.mode is PolicyMode.PROBING:
            probes.append(clock.now_s)
        clock.now_s += 0.5
    return probes


def test_measurements_are_ignored_while_off(state: PolicyState) -> None:
    state.decide(BAD)
    assert state.decide(GOOD, measured_speedup=0.5).draft_length


def test_nothing_is_probed_where_speculation_is_not_allowed(state: PolicyState, clock: Clock) -> None:
    never = dataclasses.replace(GOOD, max_draft_length=0)
    assert not state.decide(never).draft_length
    clock.now_s = 100.0
    assert not state.decide(never).draft_length
    assert state.mode is PolicyMode.OFF
