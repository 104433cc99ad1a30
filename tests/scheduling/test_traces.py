"""The planner on step traces: close to the best fixed setting in hindsight, and never slower than plain decoding.

Some traces are recorded (`experiments.planner.record`) and kept here; the others are generated from a seed
(`experiments.planner.generate`).
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import pytest

from experiments.planner.__main__ import default_limits
from experiments.planner.generate import WORLDS, generate
from experiments.planner.replay import Score, best_fixed, fixed, fixed_policies, planned, replay
from experiments.planner.trace import Round, Trace
from paceline.contract.policy import SpeculationPolicy
from paceline.scheduling import CostModel, DrafterPlacement, PlanInputs

RECORDED = sorted((Path(__file__).parent / "traces").glob("*.jsonl"))
GENERATED = {  # SHA-256 of the file that a generated trace is written to
    "drift": "37f575f2f4587c6362433c3ee1ac072935c8f7a0d6da5ff36186453aa829e1e3",
    "load": "8be5aed64dfbe52d5a0c3196a1b664759f77c2135bbf7ff81b5f6a39f2864cf0",
    "network": "2fffa823e33db5d119435bae2b074b7bc57ac35318caa9a8d2562f46dae895e1",
}
LIMITS = default_limits()
PLAIN = SpeculationPolicy.off(1, "plain")


def test_recorded_traces_are_shipped() -> None:
    assert [path.stem for path in RECORDED] == ["recorded_colocated", "recorded_separate"]


@pytest.mark.parametrize("name", GENERATED)
def test_a_seed_generates_the_same_trace_everywhere(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.jsonl"
    generate(name).write(path)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == GENERATED[name]
    assert path.stat().st_size <= 200_000
    assert "generated, not recorded" in Trace.read(path).info.origin


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recorded_trace_says_what_of_it_was_drawn(path: Path) -> None:
    trace = Trace.read(path)
    assert "recorded from a conductor's reports" in trace.info.origin
    assert "acceptances drawn" in trace.info.origin
    assert path.stem == f"recorded_{trace.info.placement}"
    assert path.stat().st_size <= 200_000
    assert {round_.num_sequences for round_ in trace.rounds} >= {1, 2, 4, 8}


def assert_regret_is_small(trace: Trace) -> float:
    """The planner knows what was measured so far; the fixed setting is chosen with the whole trace known.

    Returns:
        The planner's speed over plain decoding.
    """
    ours, plain = replay(trace, planned(trace, LIMITS)), replay(trace, fixed(PLAIN))
    setting, best = best_fixed(trace, fixed_policies(trace.info.placement))
    assert ours.tokens_per_s >= 0.95 * best.tokens_per_s, setting.reason
    assert ours.tokens_per_s >= 0.99 * plain.tokens_per_s
    return ours.tokens_per_s / plain.tokens_per_s


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_regret_is_small_on_recorded_traces(path: Path) -> None:
    assert_regret_is_small(Trace.read(path))


@pytest.mark.parametrize("name", GENERATED)
def test_regret_is_small_on_generated_traces(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.jsonl"
    generate(name).write(path)  # a file rounds what was drawn
    gain = assert_regret_is_small(Trace.read(path))
    # In "load" speculation pays for one sequence, and does not for thirty-two: the whole gain is small.
    assert gain > 1.5 or name == "load"


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", ["hopeless", "load"])
def test_it_is_never_a_burden(name: str, seed: int) -> None:
    """A drafter that knows nothing of the text, and a target that is full."""
    trace = generate(name, seed)
    ours, plain = replay(trace, planned(trace, LIMITS)), replay(trace, fixed(PLAIN))
    assert ours.tokens_per_s >= 0.99 * plain.tokens_per_s


def test_changing_with_the_load_beats_every_fixed_setting() -> None:
    trace = generate("load", 4)
    _, best = best_fixed(trace, fixed_policies("colocated"))
    assert replay(trace, planned(trace, LIMITS)).tokens_per_s > best.tokens_per_s


def steady(**changes: object) -> Trace:
    """A world in which nothing changes but the draws."""
    course = {"acceptance": lambda _: 0.7, "load": lambda _: 1.0, "rtt_ms": lambda _: 4.0, "seconds": 60.0}
    world = dataclasses.replace(WORLDS["network"], **{**course, **changes})  # type: ignore[arg-type]
    return generate("steady", worlds={"steady": world})


def inputs_of(trace: Trace, num_sequences: int) -> PlanInputs:
    return PlanInputs(
        DrafterPlacement(trace.info.placement),
        (0.7,),
        trace.step_s,
        lambda tokens: trace.draft_s(tokens, num_sequences),
        rtt_s=4e-3 if trace.info.placement == "separate" else 0.0,
        num_sequences=num_sequences,
        max_outcomes=8,
        speculation_cache_time=lambda outcomes, ahead: trace.draft_s(ahead, outcomes * num_sequences),
        sibling_acceptance=0.4,
    )


def speedup(trace: Trace, policy: SpeculationPolicy) -> float:
    plain = replay(trace, fixed(PLAIN))
    return replay(trace, fixed(policy)).tokens_per_s / plain.tokens_per_s


@pytest.mark.parametrize("num_sequences", [1, 4])
@pytest.mark.parametrize("length", [2, 5])
def test_the_cost_model_predicts_what_replays_measure(length: int, num_sequences: int) -> None:
    """Two accounts of the same thing: expectations in closed form, and steps one after another."""
    trace = steady(load=lambda _: float(num_sequences))
    inputs = inputs_of(trace, num_sequences)
    waiting = SpeculationPolicy(1, length, length, 50_000, 0, "")
    expected = CostModel(inputs).chain(length, True).speedup
    assert speedup(trace, waiting) == pytest.approx(expected, rel=0.05)
    running = SpeculationPolicy(1, length, length, 0, 0, "")
    expected = CostModel(inputs).chain(length, False).speedup
    assert speedup(trace, running) == pytest.approx(expected, rel=0.08)
    beside = dataclasses.replace(trace.info, placement="colocated")
    colocated = Trace(beside, trace.rounds)
    expected = CostModel(inputs_of(colocated, num_sequences)).chain(length, False).speedup
    assert speedup(colocated, waiting) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("num_sequences", [1, 4])
@pytest.mark.parametrize(("outcomes", "ahead"), [(4, 4), (8, 3)])
def test_enumeration_is_predicted_too(outcomes: int, ahead: int, num_sequences: int) -> None:
    trace = steady(load=lambda _: float(num_sequences))
    policy = SpeculationPolicy(1, 4, 4, 50_000, ahead, "", outcomes)
    expected = CostModel(inputs_of(trace, num_sequences)).cached(4, True, outcomes, ahead).speedup
    assert speedup(trace, policy) == pytest.approx(expected, rel=0.06)


def test_plain_decoding_in_a_replay_costs_plain_steps() -> None:
    trace = steady(seconds=5.0)
    score = replay(trace, fixed(PLAIN))
    mean_s = sum(trace.step_s(1) * round_.step_scale for round_ in trace.rounds) / len(trace.rounds)
    assert score.tokens_per_s == pytest.approx(1 / mean_s, rel=0.02)
    # Turned off half way: what was drafted before is verified once and no more.
    stop = SpeculationPolicy(1, 4, 4, 50_000, 0, "")
    half = replay(trace, lambda now_s, n, seen: stop if now_s < 2.5 else PLAIN)
    first = replay(trace, fixed(stop), until_s=2.5)
    rest = Score(half.tokens - first.tokens, half.seconds - first.seconds)
    assert rest.tokens_per_s == pytest.approx(score.tokens_per_s, rel=0.03)


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    trace = generate("load")
    trace.write(tmp_path / "trace.jsonl")
    again = Trace.read(tmp_path / "trace.jsonl")
    assert again.info == trace.info
    assert [(r.right, r.siblings) for r in again.rounds] == [(r.right, r.siblings) for r in trace.rounds]
    assert again.seconds == pytest.approx(trace.seconds)
    assert trace.at(-1.0) is trace.rounds[0]
    assert trace.at(1e9) is trace.rounds[-1]
    assert trace.step_s(1) == pytest.approx(0.010)
    assert trace.step_s(10) == pytest.approx(0.0104 + 0.0056 / 2)


@pytest.mark.parametrize(
    "line", ['[0,"1","1",1.0,1.0,-5]', '[0,"1","12",1.0,1.0,5]', '[0,"","",1.0,1.0,5]', '[0,"1","1",0,1,5]']
)
def test_lines_that_are_no_rounds_are_refused(line: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    generate("drift").write(path)
    head = path.read_text().splitlines()[0]
    path.write_text(f"{head}\n{line}\n")
    with pytest.raises(ValueError):
        Trace.read(path)
    path.write_text(head.replace('"version": 1', '"version": 2') + "\n")
    with pytest.raises(ValueError, match="version"):
        Trace.read(path)


def test_times_must_rise() -> None:
    trace = generate("drift")
    same: list[Round] = [trace.rounds[0], trace.rounds[0]]
    with pytest.raises(ValueError, match="rise"):
        Trace(trace.info, same)
