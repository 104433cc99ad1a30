"""Both clients against a real gateway: the same events, errors, retries and cancellation."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import aclosing

import grpc
import pytest

from paceline.client import (
    AsyncPacelineClient,
    CapacityError,
    Chunk,
    Completion,
    DeadlineError,
    Finished,
    InvalidRequestError,
    PacelineClient,
    RetryPolicy,
    Started,
    UnavailableError,
)
from tests.gateway.scripted_conductor import Script
from tests.gateway.server_thread import Serve, Served
from tests.gateway.tiny_model import byte_level_tokenizer

TEXT = "hello wörld 😀"
TOKENS = byte_level_tokenizer().encode(TEXT).ids
QUICK = RetryPolicy(max_attempts=6, base_s=0.05, cap_s=0.2)
ONCE = RetryPolicy(max_attempts=1)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def complete_with(kind: str, endpoint: str, prompt, retry: RetryPolicy = QUICK, **parameters) -> Completion:
    """One completion by either client."""
    if kind == "sync":
        with PacelineClient(endpoint, retry=retry) as client:
            return client.complete(prompt, **parameters)

    async def run() -> Completion:
        async with AsyncPacelineClient(endpoint, retry=retry) as client:
            return await client.complete(prompt, **parameters)

    return asyncio.run(run())


both = pytest.mark.parametrize("kind", ["sync", "async"])


def test_events_of_the_synchronous_client(serve: Serve) -> None:
    served = serve(Script(TOKENS, frame_sizes=(2,)))
    with PacelineClient(served.endpoint, retry=QUICK) as client:
        events = list(client.generate("hello", temperature=0.5, seed=7))
        info = client.model_info()
    assert isinstance(events[0], Started)
    assert (events[0].seed, events[0].mode, events[0].model) == (7, "coupled", "tiny")
    assert events[0].is_exact
    assert isinstance(events[-1], Finished)
    assert all(isinstance(event, Chunk) for event in events[1:-1])
    assert "".join(event.text for event in events[1:-1]) == TEXT
    stats = events[-1].stats
    assert stats.tokens_per_pass == pytest.approx(stats.num_generated_tokens / stats.num_target_passes)
    assert stats.acceptance_per_position[0] == 1.0
    assert stats.time_to_first_token_s == 0.001
    assert (info.model, info.placement, info.max_positions) == ("tiny", "separate", 512)


@both
@pytest.mark.parametrize("mode", ["greedy", "coupled", "rejection", "block", "typical"])
def test_what_is_not_exact_says_so(serve: Serve, kind: str, mode: str) -> None:
    served = serve(Script(TOKENS))
    temperature = 0.0 if mode == "greedy" else 0.5
    completion = complete_with(kind, served.endpoint, "hello", mode=mode, temperature=temperature)
    assert completion.is_exact is (mode != "typical")


@both
@pytest.mark.parametrize("prompt", ["hello", [{"role": "user", "content": "hello"}], [5, 6, 7]])
def test_completion_for_every_form_of_prompt(serve: Serve, kind: str, prompt) -> None:
    completion = complete_with(kind, serve(Script(TOKENS)).endpoint, prompt)
    assert (completion.text, completion.token_ids) == (TEXT, tuple(TOKENS))
    assert (completion.finish_reason, completion.model) == ("length", "tiny")


@both
@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"temperature": -1.0}, "sampling.temperature"),
        ({"temperature": float("nan")}, "sampling.temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),  # does not even fit the wire
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"seed": -1}, "sampling.seed"),
        ({"mode": "wild"}, "sampling.mode"),
        ({"stop": [""]}, "stop[0].text"),
        ({"stop_token_ids": [300]}, "stop[0].token_id"),
        ({"max_draft_tokens": 65}, "speculation.max_draft_tokens"),
        ({"model": "another"}, "model"),
        ({"regex": "a", "grammar": "start: B"}, "sampling.constraint"),
        ({"json_schema": {"type": object}}, "sampling.constraint.json_schema"),
        ({"json_schema": {"not": {}}}, "sampling.constraint.json_schema"),
        ({"choice": "yes"}, "sampling.constraint.choice"),
        ({"choice": [1]}, "sampling.constraint.choice"),
        ({"choice": []}, "sampling.constraint.choice"),
        ({"regex": 5}, "sampling.constraint.regex"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_a_bad_parameter_is_named(served_once: Served, kind: str, parameters: dict, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        complete_with(kind, served_once.endpoint, "hello", **parameters)
    assert caught.value.field == field


@pytest.fixture
def served_once(serve: Serve) -> Served:
    return serve(Script(TOKENS))


@both
@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ("", "text"),
        ([], "tokens.token_ids"),
        ([-1], "tokens.token_ids"),
        ([1, "x"], "prompt"),
        ([300], "tokens.token_ids[0]"),
    ],
)
def test_a_bad_prompt_is_named(served_once: Served, kind: str, prompt, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        complete_with(kind, served_once.endpoint, prompt)
    assert caught.value.field == field


@both
def test_parameters_reach_the_conductor(serve: Serve, kind: str) -> None:
    served = serve(Script(TOKENS))
    complete_with(
        kind,
        served.endpoint,
        "hello",
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        min_p=0.1,
        mode="rejection",
        max_tokens=11,
        stop_token_ids=[9],
        ignore_eos=True,
        speculation=False,
        max_draft_tokens=3,
        drafter="small",
        reads_features=False,
    )
    run = served.conductor.runs[0]
    assert (run.sampling.temperature, run.sampling.top_k, run.sampling.top_p, run.sampling.min_p) == (
        0.5,
        7,
        0.9,
        0.1,
    )
    assert (run.sampling.mode, run.max_new_tokens, list(run.stop_token_ids)) == (3, 11, [9])
    assert (run.speculation.disabled, run.speculation.max_draft_tokens) == (True, 3)
    assert (run.speculation.HasField("reads_features"), run.speculation.reads_features) == (True, False)
    assert (run.speculation.drafter, run.stream_interval) == ("small", 32)  # nobody watches a completion


@both
def test_constraints_reach_the_conductor(serve: Serve, kind: str) -> None:
    served = serve(Script(TOKENS))
    schema = {"type": "object", "properties": {"ä": {"type": "integer"}}}
    forms = [
        {"json_schema": schema},
        {"json_schema": '{"type": "boolean"}'},
        {"json_object": True},
        {"regex": "a|b"},
        {"grammar": 'start: "a" | "b"'},
        {"choice": ["yes", "no"]},
        {"json_object": False},
    ]
    for form in forms:
        complete_with(kind, served.endpoint, "hello", **form)
    sent = [run.sampling.constraint for run in served.conductor.runs]
    assert json.loads(sent[0].json_schema) == schema
    assert sent[1].json_schema == '{"type": "boolean"}'
    assert (sent[2].json_object, sent[3].regex, sent[4].grammar) == (True, "a|b", 'start: "a" | "b"')
    assert list(sent[5].choice.texts) == ["yes", "no"]
    assert not served.conductor.runs[6].sampling.HasField("constraint")


@both
def test_tries_again_before_the_first_token(serve: Serve, kind: str) -> None:
    served = serve(Script(TOKENS, fail_first_run_after=0))
    assert complete_with(kind, served.endpoint, "hello").text == TEXT
    assert len(served.conductor.runs) == 2


@both
def test_an_error_after_all_attempts(serve: Serve, kind: str) -> None:
    served = serve(Script(admit_status=grpc.StatusCode.RESOURCE_EXHAUSTED))
    with pytest.raises(CapacityError) as caught:
        complete_with(kind, served.endpoint, "hello", retry=ONCE)
    assert caught.value.retry_after_s == 1.0
    assert len(served.conductor.admissions) == 1


@both
def test_never_tries_again_once_text_was_shown(serve: Serve, kind: str) -> None:
    served = serve(Script(TOKENS, frame_sizes=(2,), hang_after=1), silence_timeout_s=0.1)
    with pytest.raises(UnavailableError):
        complete_with(kind, served.endpoint, "hello")
    # The gateway itself goes on at another conductor; the client sends one request.
    assert {run.prompt_token_ids[0] for run in served.conductor.runs} == {
        served.conductor.runs[0].prompt_token_ids[0]
    }
    assert [run.num_resumed_tokens for run in served.conductor.runs] == [0, 2, 4]


@both
def test_nobody_there(kind: str) -> None:
    with pytest.raises(UnavailableError):
        complete_with(kind, "127.0.0.1:9", "hello", retry=ONCE)


@both
def test_the_deadline_ends_a_generation(serve: Serve, kind: str) -> None:
    served = serve(Script(TOKENS, hang_after=1))
    start = time.monotonic()
    with pytest.raises(DeadlineError):
        complete_with(kind, served.endpoint, "hello", timeout_s=0.7)
    assert time.monotonic() - start < 5
    until(lambda: served.conductor.num_running == 0)


def test_closing_the_iterator_cancels(serve: Serve) -> None:
    served = serve(Script(TOKENS, hang_after=2))
    with PacelineClient(served.endpoint, retry=QUICK) as client:
        events = client.generate("hello")
        assert isinstance(next(events), Started)
        assert isinstance(next(events), Chunk)
        events.close()
        until(lambda: served.conductor.num_cancelled == 1)


async def test_closing_the_asynchronous_iterator_cancels(serve: Serve) -> None:
    served = serve(Script(TOKENS, hang_after=2))
    async with AsyncPacelineClient(served.endpoint, retry=QUICK) as client:
        async with aclosing(client.generate("hello")) as events:
            async for event in events:
                if isinstance(event, Chunk):
                    break
        await asyncio.to_thread(until, lambda: served.conductor.num_cancelled == 1)


async def test_cancelling_the_task_cancels(serve: Serve) -> None:
    served = serve(Script(TOKENS, hang_after=2))
    async with AsyncPacelineClient(served.endpoint, retry=QUICK) as client:
        task = asyncio.create_task(client.complete("hello"))
        await asyncio.to_thread(until, lambda: served.conductor.num_running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(until, lambda: served.conductor.num_cancelled == 1)
