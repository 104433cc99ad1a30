"""The planner against closed forms, brute force and the directions it must move in."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.contract.policy import SpeculationPolicy
from paceline.scheduling import (
    CostModel,
    DrafterPlacement,
    PlanInputs,
    StepCurve,
    evaluate,
    plan,
)


def affine(base: float, slope: float) -> Callable[[int], float]:
    return lambda count: base + slope * count


def per_token(seconds: float) -> Callable[[int], float]:
    return lambda count: seconds * count


def flat(_: int) -> float:
    return 1.0


def inputs(
    rate: float, draft_s: float, placement: DrafterPlacement = DrafterPlacement.COLOCATED, **changes: object
) -> PlanInputs:
    """Step time 1 whatever the rows, so that all else is in units of a step."""
    base = PlanInputs(placement, (rate,), flat, per_token(draft_s), max_draft_length=24, max_wait_s=100.0)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("length", [1, 3, 8])
def test_expected_tokens_are_the_geometric_sum(rate: float, length: int) -> None:
    """E(g) = (1 - a^(g+1)) / (1 - a) (Leviathan et al., arXiv 2211.17192, equation 1)."""
    found = CostModel(inputs(rate, 0.05)).chain(length, False)
    expected = (1 - rate ** (length + 1)) / (1 - rate)
    assert found.tokens_per_s == pytest.approx(expected / (1 + 0.05 * length))
    assert found.speedup == pytest.approx(found.tokens_per_s)


@pytest.mark.parametrize(
    ("rate", "draft_s", "rtt_s", "speedup", "length"),
    [
        (0.7, 0.05, 0.0, 2.35, 6),
        (0.7, 0.05, 1.0, 1.34, 7),
        (0.8, 0.05, 0.0, 3.09, 8),
        (0.8, 0.05, 0.2, 2.71, 8),
        (0.8, 0.05, 1.0, 1.83, 10),
        (0.8, 0.05, 2.0, 1.31, 12),
        (0.8, 0.10, 0.5, 1.89, 7),
        (0.9, 0.05, 0.0, 4.67, 13),
        (0.9, 0.05, 2.0, 2.23, 20),
    ],
)
def test_the_best_synchronous_length_is_the_known_one(
    rate: float, draft_s: float, rtt_s: float, speedup: float, length: int
) -> None:
    """S(g) = E(g) / (1 + c g + r): figures of the closed-form optimum by Lambert's W, to two digits."""
    given_inputs = inputs(rate, draft_s, DrafterPlacement.SEPARATE, rtt_s=rtt_s)
    found = [CostModel(given_inputs).chain(candidate, True) for candidate in range(1, 25)]
    best = max(found, key=lambda evaluation: evaluation.speedup)
    assert (best.draft_length, round(best.speedup, 2)) == (length, speedup)


def test_a_running_verifier_loses_the_tokens_it_overtakes() -> None:
    found = CostModel(inputs(0.5, 0.0, DrafterPlacement.SEPARATE, rtt_s=1.5)).chain(4, False)
    # Two plain steps pass; then drafts 3 and 4 count if 1 and 2 were right.
    assert found.tokens_per_s == pytest.approx((2 + 1 + 0.125 + 0.0625) / 3)


def test_waiting_is_chosen_only_when_it_pays() -> None:
    near = evaluate(inputs(0.8, 0.05, DrafterPlacement.SEPARATE, rtt_s=0.1))
    assert near.waits_for_drafts
    assert near.wait_budget_s == pytest.approx(0.05 * near.draft_length + 0.1)
    far = evaluate(inputs(0.9, 0.01, DrafterPlacement.SEPARATE, rtt_s=8.0))
    assert not far.waits_for_drafts
    assert far.wait_budget_s == 0
    assert far.speedup > 1


def test_a_wait_longer_than_allowed_is_never_planned() -> None:
    found = evaluate(inputs(0.8, 0.05, DrafterPlacement.SEPARATE, rtt_s=0.1, max_wait_s=0.12))
    assert found.wait_budget_s <= 0.12
    assert not found.waits_for_drafts or 0.05 * found.draft_length + 0.1 <= 0.12


def test_hidden_time_costs_nothing_and_is_at_most_half() -> None:
    case = inputs(0.8, 0.05, DrafterPlacement.SEPARATE, rtt_s=0.2)
    for overlap_s, wait_s in ((0.1, 0.3), (0.2, 0.2), (10.0, 0.2)):
        hidden = CostModel(dataclasses.replace(case, overlap_s=overlap_s)).chain(4, True)
        shorter = CostModel(inputs(0.8, 0.0, DrafterPlacement.SEPARATE, rtt_s=wait_s)).chain(4, True)
        assert hidden.speedup == pytest.approx(shorter.speedup)
        assert hidden.wait_budget_s == pytest.approx(0.4)  # of what may come later


def brute_force(given_inputs: PlanInputs) -> float:
    """Best tokens per second, written out anew."""
    load, step = given_inputs.num_sequences, given_inputs.step_time
    best = load / step(load)
    for length in range(1, min(given_inputs.max_draft_length, given_inputs.max_nodes) + 1):
        by_position = [
            given_inputs.acceptance[min(i, len(given_inputs.acceptance) - 1)] for i in range(length)
        ]
        path_acceptances = [math.prod(by_position[:j]) for j in range(1, length + 1)]
        draft = given_inputs.draft_time(length)
        if given_inputs.placement is DrafterPlacement.COLOCATED:
            best = max(best, load * (1 + sum(path_acceptances)) / (step(load * (1 + length)) + draft))
            continue
        whole = draft + given_inputs.rtt_s + given_inputs.queue_s
        wait = whole - min(given_inputs.overlap_s, whole / 2)
        if whole <= given_inputs.max_wait_s:  # what overlaps today may not tomorrow
            best = max(best, load * (1 + sum(path_acceptances)) / (step(load * (1 + length)) + wait))
        passed = math.ceil(wait / step(load))
        tokens = passed + 1 + sum(path_acceptances[passed:])
        rows = load * (1 + max(0, length - passed))
        best = max(best, load * tokens / (passed * step(load) + step(rows)))
    return best


plans = st.builds(
    PlanInputs,
    placement=st.sampled_from(list(DrafterPlacement)),
    acceptance=st.lists(st.floats(0, 1), min_size=1, max_size=5).map(tuple),
    step_time=st.builds(affine, st.floats(0.1, 2), st.floats(0, 0.5)),
    draft_time=st.builds(affine, st.floats(0, 0.5), st.floats(0, 0.5)),
    rtt_s=st.floats(0, 3),
    queue_s=st.floats(0, 1),
    overlap_s=st.floats(0, 2),
    num_sequences=st.integers(1, 16),
    max_draft_length=st.integers(0, 10),
    max_nodes=st.integers(0, 16),
    max_wait_s=st.floats(0, 2),
)


@given(plans)
@example(  # a draft time so short that its inverse overflows
    PlanInputs(
        DrafterPlacement.SEPARATE,
        (1.0,),
        affine(1.0, 0.0),
        affine(0.0, 2.3e-311),
        max_draft_length=1,
        max_nodes=1,
    )
)
@example(  # a wait that is the longest draft wait to the last bit
    PlanInputs(
        DrafterPlacement.SEPARATE,
        (1.0,),
        affine(1.0, 0.0),
        affine(0.0, 0.0),
        rtt_s=2.0,
        queue_s=0.19430036828369285,
        overlap_s=2.0,
        max_draft_length=1,
        max_nodes=1,
        max_wait_s=0.19430036828369285,
    )
)
@settings(max_examples=300)
def test_the_plan_is_the_best_and_never_below_plain_decoding(given_inputs: PlanInputs) -> None:
    best = evaluate(given_inputs)
    assert best.tokens_per_s == pytest.approx(brute_force(given_inputs), rel=1e-9)
    assert best.speedup >= 1
    policy = plan(given_inputs, version=7)
    assert policy.version == 7
    assert (policy.draft_length > 0) == (best.speedup >= 1 + given_inputs.margin)
    assert policy.draft_length <= policy.max_nodes_per_sequence or not policy.draft_length
    assert policy.max_nodes_per_sequence <= given_inputs.max_nodes
    assert policy.wait_budget_us <= given_inputs.max_wait_s * 1e6 + 1
    assert SpeculationPolicy.from_dict(policy.to_dict()) == policy


def best_length(given_inputs: PlanInputs, waits_for_drafts: bool) -> int:
    candidates = [
        CostModel(given_inputs).chain(length, waits_for_drafts)
        for length in range(1, given_inputs.max_draft_length + 1)
    ]
    return max(candidates, key=lambda found: found.tokens_per_s).draft_length


@given(
    st.lists(st.floats(0.05, 0.99), min_size=1, max_size=5).map(tuple),
    st.floats(0.2, 2),
    st.floats(0, 0.2),
    st.floats(0.001, 0.2),
    st.lists(st.floats(0, 4), min_size=2, max_size=4).map(sorted),
)
def test_a_longer_round_trip_never_makes_drafts_shorter(
    acceptance: tuple[float, ...], base_s: float, slope_s: float, draft_s: float, rtts_s: list[float]
) -> None:
    lengths = []
    for rtt_s in rtts_s:
        given_inputs = PlanInputs(
            DrafterPlacement.SEPARATE, acceptance, affine(base_s, slope_s), per_token(draft_s), rtt_s=rtt_s,
            max_draft_length=16,
        )  # fmt: skip
        lengths.append(best_length(given_inputs, True))
    assert lengths == sorted(lengths)


@given(
    st.sampled_from(list(DrafterPlacement)),
    st.lists(st.floats(0.05, 0.99), min_size=1, max_size=5).map(tuple),
    st.floats(0.2, 2),
    st.floats(0.001, 0.2),
    st.floats(0, 0.19),
    st.lists(st.integers(1, 64), min_size=2, max_size=4).map(sorted),
)
def test_more_load_never_makes_drafts_longer(
    placement: DrafterPlacement,
    acceptance: tuple[float, ...],
    base_s: float,
    slope_s: float,
    draft_s: float,
    loads: list[int],
) -> None:
    """Where a step's fixed part outweighs a drafted token, as it does wherever drafting makes sense."""
    lengths = []
    for load in loads:
        given_inputs = PlanInputs(
            placement, acceptance, affine(base_s, slope_s), per_token(draft_s), num_sequences=load,
            max_draft_length=16,
        )  # fmt: skip
        lengths.append(best_length(given_inputs, True))
    assert lengths == sorted(lengths, reverse=True)


def test_free_rows_are_offered_to_trees() -> None:
    def step_time(rows: int) -> float:
        return 1.0 if rows <= 16 else 2.0

    policy = plan(dataclasses.replace(inputs(0.7, 0.05), step_time=step_time))
    assert policy.draft_length == 6
    assert policy.max_nodes_per_sequence == 15


def test_a_separate_drafter_drafts_ahead_while_the_target_verifies() -> None:
    assert plan(inputs(0.8, 0.3, DrafterPlacement.SEPARATE, rtt_s=0.01)).draft_ahead == 3
    assert plan(inputs(0.8, 0.3)).draft_ahead == 0


def test_a_drafter_that_slows_the_target_down_is_waited_for() -> None:
    """Steps that run while it drafts take longer; steps that wait do not."""
    shared = inputs(0.7, 0.2, DrafterPlacement.SEPARATE, rtt_s=0.3, concurrent_slowdown=0.5)
    alone = dataclasses.replace(shared, concurrent_slowdown=0.0)
    for length in (1, 3, 5):
        assert CostModel(shared).chain(length, True) == CostModel(alone).chain(length, True)
        slower, faster = (CostModel(case).chain(length, False).tokens_per_s for case in (shared, alone))
        assert slower == pytest.approx(faster / 1.5)
    assert plan(shared).wait_budget_us > 0


def test_nothing_is_drafted_ahead_that_would_hardly_be_used() -> None:
    likely, unlikely = (
        inputs(0.9, 0.1, DrafterPlacement.SEPARATE),
        inputs(0.5, 0.01, DrafterPlacement.SEPARATE),
    )
    for case, is_worth_it in ((likely, True), (unlikely, False)):
        policy = plan(case)
        path_acceptance = case.path_acceptances(policy.draft_length)[-1]
        assert policy.draft_length >= 1
        assert (path_acceptance >= 0.2) is is_worth_it
        assert (policy.draft_ahead > 0) is is_worth_it


def test_the_slowest_round_trips_lengthen_the_wait_budget_and_not_the_cost() -> None:
    mean = inputs(0.8, 0.05, DrafterPlacement.SEPARATE, rtt_s=0.1)
    spread = dataclasses.replace(mean, rtt_p95_s=0.3)
    assert CostModel(spread).chain(4, True).speedup == CostModel(mean).chain(4, True).speedup
    assert CostModel(spread).chain(4, True).wait_budget_s == pytest.approx(0.5)


@pytest.mark.parametrize(
    "changes",
    [
        {"acceptance": (0.5, 1.5)},
        {"acceptance": (math.nan,)},
        {"rtt_s": -1.0},
        {"rtt_s": math.nan},
        {"rtt_p95_s": math.inf},
        {"num_sequences": 0},
        {"max_draft_length": -1},
    ],
)
def test_impossible_inputs_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        inputs(0.5, 0.1, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [{"draft_length": -1}, {"wait_budget_us": 1.5}, {"version": True}, {"reason": 3}, {"surprise": 1}],
)
def test_policies_from_elsewhere_are_checked(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        SpeculationPolicy.from_dict({**SpeculationPolicy.off(1, "off").to_dict(), **changes})


def test_a_measured_curve_serves_as_step_time() -> None:
    curve = StepCurve.fit([(1, 0.0140), (8, 0.0148), (16, 0.0189)])
    policy = plan(PlanInputs(DrafterPlacement.COLOCATED, (0.8, 0.75, 0.7), curve, per_token(0.001)))
    assert policy.draft_length
    assert "speedup" in policy.reason
