"""When a step event is published: when the next pass begins, and always before any frame that follows the step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.contract.policy import StepPolicy
from paceline.sampling.params import SamplingParams
from paceline.target import TargetEngine
from services.verifier.inbox import Close, Open, SetPolicy
from services.verifier.specs import SequenceSpec
from tests.simulation.verifier import ListedSession, SteppedVerifier

PROMPT = [5, 6, 7, 8]


class Stream:
    """A verifier that nobody drafts for, and one conductor's stream."""

    def __init__(self, target_dir: Path) -> None:
        self.verifier = SteppedVerifier(TargetEngine.load(target_dir, "cpu", torch.float32))
        self.verifier.put(SetPolicy(StepPolicy(max_nodes_per_sequence=0)))
        self.session = ListedSession()

    def open(self, prompt: Iterable[int] = PROMPT, key: int = 1, num_tokens: int = 1000) -> None:
        spec = SequenceSpec(key, 0, tuple(prompt), SamplingParams(0.0), num_tokens, frozenset(), 8)
        self.verifier.put(Open(self.session, spec, None))

    def step(self) -> int:
        """Run a step as the thread does; returns how many steps were published since the last call."""
        self.verifier.step(publishes=False)
        return sum(frame.HasField("step") for frame in self.session.take())


@pytest.fixture
def stream(target_dir: Path) -> Stream:
    return Stream(target_dir)


def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come to that")


def test_a_step_is_published_when_the_next_pass_begins(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream.open()
    assert stream.step() == 1  # the first token
    assert stream.step() == 0
    seen = []
    forward = stream.verifier.engine.executor.forward

    def watched(*arguments: Any) -> Any:
        before = len(stream.session.frames)
        output = forward(*arguments)
        seen.append(len(stream.session.frames) - before)
        return output

    monkeypatch.setattr(stream.verifier.engine.executor, "forward", watched)
    assert stream.step() == 1
    assert seen == [1]


@pytest.mark.parametrize("prompt", [[5], PROMPT])
def test_first_and_last_tokens_are_published_at_once(stream: Stream, prompt: list[int]) -> None:
    stream.open(prompt, num_tokens=3)
    assert [stream.step() for _ in range(3)] == [1, 0, 2]


def test_the_first_token_of_a_known_prompt_is_published_at_once(stream: Stream) -> None:
    prompt = list(range(1, 40))
    stream.open(prompt, num_tokens=2)
    assert [stream.step() for _ in range(2)] == [1, 1]
    stream.open(prompt, key=2)
    assert stream.step() == 1
    assert stream.verifier.stats[-1].num_prefill_rows == 0  # all of it was there


def test_steps_are_published_at_once_where_a_drafter_elsewhere_waits(stream: Stream) -> None:
    stream.verifier.put(SetPolicy(StepPolicy(max_nodes_per_sequence=4)))
    stream.open()
    assert [stream.step() for _ in range(4)] == [1, 1, 1, 1]


def test_no_frame_comes_before_the_step_that_it_follows(stream: Stream) -> None:
    stream.open()
    stream.step()
    stream.step()
    stream.open([6, 7], key=2)
    stream.verifier.step(publishes=False)
    frames = stream.session.take()
    assert frames[0].HasField("step")
    assert any(frame.opened for frame in frames[1:])


def test_the_last_step_is_published_before_a_verifier_idles(stream: Stream) -> None:
    stream.open()
    stream.step()
    assert stream.step() == 0
    [sequence] = stream.verifier.table.running
    stream.verifier.put(Close(stream.session, sequence.sequence_id))
    assert stream.step() == 1
    assert stream.step() == 0


def test_all_steps_are_published_when_the_loop_stops(stream: Stream) -> None:
    stream.open(num_tokens=500)
    loop = stream.verifier.start()
    until(lambda: len(stream.verifier.stats) > 5)
    loop.stop()
    assert not loop.is_alive
    assert [stats.step_index for stats in stream.verifier.stats] == list(
        range(1, stream.verifier.stats[-1].step_index + 1)
    )
    assert stream.verifier.stats[-1].step_index == stream.verifier.runner.num_steps


def test_all_steps_are_published_when_the_loop_fails(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, passes = stream.verifier.engine, []
    step = engine.step

    def failing(*arguments: Any, **more: Any) -> Any:
        passes.append(1)
        if len(passes) == 4:
            raise RuntimeError("a broken device")
        return step(*arguments, **more)

    monkeypatch.setattr(engine, "step", failing)
    stream.open()
    loop = stream.verifier.start()
    until(lambda: not loop.is_alive)
    assert isinstance(loop.failure, RuntimeError)
    assert len(stream.verifier.stats) == 3
