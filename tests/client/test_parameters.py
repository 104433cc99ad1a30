"""Every sampling parameter from Python to the conductor, and log-probabilities and choices on the way back."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from paceline.client import (
    AsyncPacelineClient,
    Chunk,
    Completion,
    Finished,
    InvalidRequestError,
    PacelineClient,
    PromptLogProbs,
    Started,
    TokenLogProb,
)
from paceline.client.requests import build_request
from paceline.v1 import sampling_pb2
from tests.client.test_clients import QUICK, TEXT, TOKENS, both, complete_with, until
from tests.gateway.scripted_conductor import Script
from tests.gateway.server_thread import Serve
from tests.gateway.tiny_model import byte_level_tokenizer

PROMPT = "hello to you"
PARAMETERS = {
    "temperature": 0.5,
    "repetition_penalty": 1.25,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.75,
    "logit_bias": {7: -100.0, 9: 2.5},
    "bad_words": ["wo"],
    "bad_runs": [[5, 6], [7]],
    "min_tokens": 3,
    "log_probs": 2,
    "prompt_log_probs": 1,
    "stop_token_ids": [8],
    "seed": 40,
}


def many_with(kind: str, endpoint: str, n: int, **parameters) -> list[Completion]:
    """Several completions by either client."""
    if kind == "sync":
        with PacelineClient(endpoint, retry=QUICK) as client:
            return client.complete_many(PROMPT, n, **parameters)

    async def run() -> list[Completion]:
        async with AsyncPacelineClient(endpoint, retry=QUICK) as client:
            return await client.complete_many(PROMPT, n, **parameters)

    return asyncio.run(run())


@both
def test_parameters_reach_the_conductor_and_log_probs_come_back(serve: Serve, kind: str) -> None:
    served = serve(Script(TOKENS, frame_sizes=(3,)))
    completion = complete_with(kind, served.endpoint, PROMPT, **PARAMETERS)
    sent = served.conductor.runs[0]
    sampling = sent.sampling
    for name in (
        "temperature",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "min_tokens",
        "seed",
    ):
        assert getattr(sampling, name) == PARAMETERS[name]
    assert dict(sampling.logit_bias) == PARAMETERS["logit_bias"]
    encode = byte_level_tokenizer().encode
    assert [list(run.token_ids) for run in sampling.bad_runs] == [
        [5, 6],
        [7],
        encode("wo").ids,
        encode(" wo").ids,
    ]
    assert sent.log_probs == sampling_pb2.LogProbOptions(num_top=2, num_prompt_top=1)
    assert list(sent.stop_token_ids) == [1, 8]
    assert completion.text == TEXT
    assert completion.log_probs == tuple(
        TokenLogProb(token, -float(token), token + 1, ((token, 0.0), ((token + 1) % 300, -1.0)))
        for token in TOKENS
    )
    prompt = list(sent.prompt_token_ids)
    assert len(prompt) > 4
    assert [entry.token_id for entry in completion.prompt_log_probs] == prompt[1:]
    assert [entry.log_prob for entry in completion.prompt_log_probs] == [
        -float(token) for token in prompt[1:]
    ]


def test_events_carry_log_probs_and_the_prompts_come_first(serve: Serve) -> None:
    served = serve(Script(TOKENS, frame_sizes=(3,)))
    with PacelineClient(served.endpoint, retry=QUICK) as client:
        events = list(client.generate(PROMPT, log_probs=0, prompt_log_probs=0))
    assert isinstance(events[0], Started)
    assert isinstance(events[1], PromptLogProbs)
    assert len(events[1].log_probs) == len(events[1].token_ids) - 1 > 3
    chunks = [event for event in events if isinstance(event, Chunk)]
    assert all([entry.token_id for entry in chunk.log_probs] == list(chunk.token_ids) for chunk in chunks)
    assert all(entry.top == () for chunk in chunks for entry in chunk.log_probs)


@both
def test_who_does_not_ask_gets_no_log_probs(serve: Serve, kind: str) -> None:
    completion = complete_with(kind, serve(Script(TOKENS)).endpoint, "hello")
    assert (completion.log_probs, completion.prompt_log_probs) == ((), ())


@both
def test_several_completions_in_order_of_their_index(serve: Serve, kind: str) -> None:
    script = Script(TOKENS, frame_sizes=(1, 4))
    script.tokens_by_seed = {6: byte_level_tokenizer().encode("second").ids, 7: []}
    completions = many_with(kind, serve(script).endpoint, 3, seed=5, temperature=1.0, prompt_log_probs=0)
    assert [completion.text for completion in completions] == [TEXT, "second", ""]
    assert [completion.seed for completion in completions] == [5, 6, 7]
    assert [bool(completion.prompt_log_probs) for completion in completions] == [True, False, False]
    assert len({completion.request_id for completion in completions}) == 3


def test_events_of_several_choices_are_marked_and_each_begins_with_started(serve: Serve) -> None:
    served = serve(Script(TOKENS))
    with PacelineClient(served.endpoint, retry=QUICK) as client:
        events = list(client.generate("hello", n=2))
    for index in (0, 1):
        own = [event for event in events if event.index == index]
        assert isinstance(own[0], Started)
        assert isinstance(own[-1], Finished)
        assert all(isinstance(event, Chunk) for event in own[1:-1])


async def test_leaving_the_iterator_cancels_every_choice(serve: Serve) -> None:
    served = serve(Script(TOKENS, hang_after=1))
    async with AsyncPacelineClient(served.endpoint, retry=QUICK) as client:
        async with aclosing(client.generate("hello", n=3)) as events:
            async for event in events:
                if isinstance(event, Chunk) and served.conductor.num_running == 3:
                    break
        await asyncio.to_thread(until, lambda: served.conductor.num_cancelled == 3)


@both
@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"repetition_penalty": 0.0}, "sampling.repetition_penalty"),
        ({"presence_penalty": 2.5}, "sampling.presence_penalty"),
        ({"frequency_penalty": float("nan")}, "sampling.frequency_penalty"),
        ({"logit_bias": {300: 1.0}}, "sampling.logit_bias[300]"),
        ({"logit_bias": {-1: 1.0}}, "sampling.logit_bias[-1]"),  # does not even fit the wire
        ({"logit_bias": {1: 1000.0}}, "sampling.logit_bias[1]"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"bad_runs": [[1], [300]]}, "sampling.bad_runs[1].token_ids[0]"),
        ({"bad_runs": [[-1]]}, "sampling.bad_runs[0]"),
        ({"min_tokens": 5, "max_tokens": 4}, "sampling.min_tokens"),
        ({"log_probs": 21}, "log_probs.num_top"),
        ({"prompt_log_probs": -1}, "log_probs.num_prompt_top"),
        ({"n": 2}, "n"),
    ],
)
def test_a_bad_parameter_is_named(serve: Serve, kind: str, parameters: dict, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        complete_with(kind, serve(Script(TOKENS)).endpoint, "hello", **parameters)
    assert caught.value.field == field


@both
@pytest.mark.parametrize("n", [0, 17, -1])
def test_a_bad_number_of_completions_is_named(serve: Serve, kind: str, n: int) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        many_with(kind, serve(Script(TOKENS)).endpoint, n)
    assert caught.value.field == "n"


def test_a_tenant_is_named() -> None:
    assert build_request("hello", tenant="acme").tenant == "acme"
    assert build_request("hello").tenant == ""


def test_absent_parameters_stay_absent() -> None:
    request = build_request("hello")
    assert not request.HasField("n")
    assert not request.HasField("log_probs") or not request.log_probs.ListFields()
    assert not request.sampling.HasField("repetition_penalty")
