"""When others are told of a step: as late as the next pass begins, and never after anything else that is said."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.sampling import SamplingParams
from paceline.target import TargetEngine
from services.verifier.inbox import Close, Open, SetPolicy
from services.verifier.policy import StepPolicy
from services.verifier.sequence import SequenceSpec
from tests.simulation.verifier import ListedSession, SteppedVerifier

PROMPT = [5, 6, 7, 8]


class Told:
    """A verifier that nobody drafts for, and one conductor's stream."""

    def __init__(self, target_dir: Path) -> None:
        self.verifier = SteppedVerifier(TargetEngine.load(target_dir, "cpu", torch.float32))
        self.verifier.put(SetPolicy(StepPolicy(max_nodes_per_sequence=0)))
        self.session = ListedSession()

    def open(self, prompt: Iterable[int] = PROMPT, key: int = 1, num_tokens: int = 1000) -> None:
        spec = SequenceSpec(key, 0, tuple(prompt), SamplingParams(0.0), num_tokens, frozenset(), 8)
        self.verifier.put(Open(self.session, spec, None))

    def turn(self) -> int:
        """Makes a step as the thread does; returns how many have been told of since the last call."""
        self.verifier.turn(publishes=False)
        return sum(frame.HasField("step") for frame in self.session.take())


@pytest.fixture
def told(target_dir: Path) -> Told:
    return Told(target_dir)


def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come to that")


def test_a_step_is_told_of_when_the_next_pass_begins(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    told.open()
    assert told.turn() == 1  # the first token
    assert told.turn() == 0
    seen = []
    forward = told.verifier.engine.executor.forward

    def watched(*arguments: Any) -> Any:
        before = len(told.session.frames)
        output = forward(*arguments)
        seen.append(len(told.session.frames) - before)
        return output

    monkeypatch.setattr(told.verifier.engine.executor, "forward", watched)
    assert told.turn() == 1
    assert seen == [1]


@pytest.mark.parametrize("prompt", [[5], PROMPT])
def test_first_and_last_tokens_are_told_of_at_once(told: Told, prompt: list[int]) -> None:
    told.open(prompt, num_tokens=3)
    assert [told.turn() for _ in range(3)] == [1, 0, 2]


def test_the_first_token_of_a_known_prompt_is_told_of_at_once(told: Told) -> None:
    prompt = list(range(1, 40))
    told.open(prompt, num_tokens=2)
    assert [told.turn() for _ in range(2)] == [1, 1]
    told.open(prompt, key=2)
    assert told.turn() == 1
    assert told.verifier.stats[-1].num_prefill_rows == 0  # all of it was there


def test_steps_are_told_of_at_once_where_a_drafter_elsewhere_waits(told: Told) -> None:
    told.verifier.put(SetPolicy(StepPolicy(max_nodes_per_sequence=4)))
    told.open()
    assert [told.turn() for _ in range(4)] == [1, 1, 1, 1]


def test_nothing_is_said_before_the_step_that_it_follows(told: Told) -> None:
    told.open()
    told.turn()
    told.turn()
    told.open([6, 7], key=2)
    told.verifier.turn(publishes=False)
    frames = told.session.take()
    assert frames[0].HasField("step")
    assert any(frame.opened for frame in frames[1:])


def test_the_last_step_is_told_of_before_a_verifier_idles(told: Told) -> None:
    told.open()
    told.turn()
    assert told.turn() == 0
    [sequence] = told.verifier.table.running
    told.verifier.put(Close(told.session, sequence.sequence_id))
    assert told.turn() == 1
    assert told.turn() == 0


def test_all_steps_are_told_of_when_the_loop_stops(told: Told) -> None:
    told.open(num_tokens=500)
    loop = told.verifier.start()
    until(lambda: len(told.verifier.stats) > 5)
    loop.stop()
    assert not loop.is_alive
    assert [stats.step_index for stats in told.verifier.stats] == list(
        range(1, told.verifier.stats[-1].step_index + 1)
    )
    assert told.verifier.stats[-1].step_index == loop._step_index


def test_all_steps_are_told_of_when_the_loop_fails(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, passes = told.verifier.engine, []
    step = engine.step

    def failing(*arguments: Any, **more: Any) -> Any:
        passes.append(1)
        if len(passes) == 4:
            raise RuntimeError("a broken device")
        return step(*arguments, **more)

    monkeypatch.setattr(engine, "step", failing)
    told.open()
    loop = told.verifier.start()
    until(lambda: not loop.is_alive)
    assert isinstance(loop.failure, RuntimeError)
    assert len(told.verifier.stats) == 3
