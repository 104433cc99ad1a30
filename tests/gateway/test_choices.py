"""Several completions of one request: each its own events and seed, all ending together where one fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import grpc
import pytest
from grpc import aio

from paceline.v1 import generation_pb2, sampling_pb2
from services.gateway.choices import merged
from tests.gateway.conftest import Gateway
from tests.gateway.scripted_conductor import Script, log_probs_of, scripted_orchestrator
from tests.gateway.test_servicer import TEXT, TIMEOUT_S, TOKENIZER, TOKENS, collect, ready, until

OPTIONS = sampling_pb2.LogProbOptions(num_top=1, num_prompt_top=2)


def request(**fields) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(text="hello to you", **fields)


def by_choice(
    events: list[generation_pb2.GenerateResponse],
) -> dict[int, list[generation_pb2.GenerateResponse]]:
    split: dict[int, list[generation_pb2.GenerateResponse]] = {}
    for event in events:
        split.setdefault(event.index, []).append(event)
    return split


@pytest.mark.parametrize("n", [1, 2, 16])
async def test_each_choice_has_its_events_and_its_seed(gateway: Gateway, n: int) -> None:
    script = Script(TOKENS, frame_sizes=(2, 1, 3))
    script.tokens_by_seed = {11: TOKENIZER.encode("another").ids}
    async with scripted_orchestrator(script) as conductor, gateway(conductor.endpoint) as stub:
        await ready(stub)
        sampling = {"temperature": 0.5, "seed": 10}
        events = await collect(stub, request(n=n, sampling=sampling, log_probs=OPTIONS))
    choices = by_choice(events)
    assert sorted(choices) == list(range(n))
    assert sorted(run.sampling.seed for run in conductor.runs) == [10 + index for index in range(n)]
    assert sorted(run.log_probs.HasField("num_prompt_top") for run in conductor.runs) == [False] * (n - 1) + [
        True
    ]
    for index, own in choices.items():
        kinds = [event.WhichOneof("event") for event in own]
        assert (kinds[0], kinds[-1], kinds.count("started"), kinds.count("finished")) == (
            "started",
            "finished",
            1,
            1,
        )
        assert own[0].started.seed == 10 + index
        assert kinds.count("prompt_log_probs") == (1 if index == 0 else 0)
        if index == 0:
            assert kinds[1] == "prompt_log_probs"
            prompt = own[1].prompt_log_probs
            assert prompt.log_probs == log_probs_of(prompt.token_ids[1:], 2)
        assert "".join(event.chunk.text for event in own) == ("another" if index == 1 else TEXT)
        for event in own:
            assert len(event.chunk.log_probs.log_probs) == len(event.chunk.token_ids)
    assert len({own[0].started.request_id for own in choices.values()}) == n


async def test_a_choice_that_fails_ends_the_others(gateway: Gateway) -> None:
    script = Script(TOKENS, hang_after=2, fail_seed=12)
    async with scripted_orchestrator(script) as conductor, gateway(conductor.endpoint) as stub:
        await ready(stub)
        with pytest.raises(aio.AioRpcError) as caught:
            await collect(stub, request(n=3, sampling={"seed": 10}))
        await until(lambda: conductor.num_running == 0)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_client_that_goes_away_cancels_every_choice(gateway: Gateway) -> None:
    script = Script(TOKENS, hang_after=2)
    async with scripted_orchestrator(script) as conductor, gateway(conductor.endpoint) as stub:
        await ready(stub)
        call = stub.Generate(request(n=4), timeout=TIMEOUT_S)
        async for event in call:
            if event.WhichOneof("event") == "chunk" and conductor.num_running == 4:
                break
        call.cancel()
        await until(lambda: conductor.num_cancelled == 4)
        assert conductor.num_running == 0


async def test_choices_count_towards_the_limit(gateway: Gateway) -> None:
    async with (
        scripted_orchestrator(Script(TOKENS)) as conductor,
        gateway(conductor.endpoint, max_requests=3) as stub,
    ):
        await ready(stub)
        with pytest.raises(aio.AioRpcError) as caught:
            await collect(stub, request(n=4))
        assert len(by_choice(await collect(stub, request(n=3)))) == 3
        assert len(by_choice(await collect(stub, request(n=3)))) == 3  # the places were given back
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("n", [0, 17])
async def test_a_bad_number_of_choices_is_named(gateway: Gateway, n: int) -> None:
    async with scripted_orchestrator(Script(TOKENS)) as conductor, gateway(conductor.endpoint) as stub:
        await ready(stub)
        with pytest.raises(aio.AioRpcError, match="n: must be from 1 to 16") as caught:
            await collect(stub, request(n=n))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_lost_conductor_leaves_no_gap_in_log_probs(gateway: Gateway) -> None:
    script = Script(TOKENS, frame_sizes=(2,), fail_first_run_after=3)
    async with scripted_orchestrator(script) as conductor, gateway(conductor.endpoint) as stub:
        await ready(stub)
        events = await collect(stub, request(log_probs=OPTIONS))
    assert [run.log_probs.HasField("num_prompt_top") for run in conductor.runs] == [True, False]
    kinds = [event.WhichOneof("event") for event in events]
    assert (kinds.count("prompt_log_probs"), kinds[1]) == (1, "prompt_log_probs")
    found = sampling_pb2.LogProbs()
    for event in events:
        found.MergeFrom(event.chunk.log_probs)
        found.num_top = 1
    assert found == log_probs_of(TOKENS, 1)


async def test_a_slow_reader_of_merged_streams_gets_all_and_closing_ends_them() -> None:
    ended: list[int] = []

    async def stream(which: int, count: int) -> AsyncGenerator[tuple[int, int], None]:
        try:
            for number in range(count):
                yield which, number
        finally:
            ended.append(which)

    events = []
    async for event in merged([stream(which, 100) for which in range(3)]):
        events.append(event)
        await asyncio.sleep(0)
    assert all([n for which, n in events if which == own] == list(range(100)) for own in range(3))
    assert sorted(ended) == [0, 1, 2]
    endless = merged([stream(which, 10**9) for which in range(3, 6)])
    assert await anext(endless)
    await endless.aclose()
    assert sorted(ended) == [0, 1, 2, 3, 4, 5]
