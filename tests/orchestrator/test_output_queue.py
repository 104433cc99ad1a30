"""The output queue between a sequence and its reader."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator.output_queue import Ending, OutputQueue
from paceline.v1 import sampling_pb2
from tests.orchestrator.scripted_peers import log_probs_of


async def test_an_output_queue_merges_for_a_slow_reader_and_ends_once() -> None:
    output_queue = OutputQueue()
    output_queue.put_prompt(log_probs_of([7, 8], 1))
    output_queue.put([1], log_probs_of([1], 2))
    output_queue.wake()
    output_queue.put_prompt(log_probs_of([9], 1))
    output_queue.put([2, 3], log_probs_of([2, 3], 2))
    output_queue.end(Ending(sampling_pb2.FINISH_REASON_STOP))
    output_queue.end(Ending(sampling_pb2.FINISH_REASON_ERROR))
    output_queue.wake()
    output = await output_queue.take()
    tokens, ending = output.tokens, output.ending
    assert tokens == [1, 2, 3]
    assert output.log_probs == log_probs_of([1, 2, 3], 2)
    assert output.prompt_log_probs == log_probs_of([7, 8, 9], 1)
    assert ending is not None
    assert ending.finish_reason == sampling_pb2.FINISH_REASON_STOP
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await output_queue.take()


async def test_an_output_queue_with_an_interval_waits_for_enough() -> None:
    output_queue = OutputQueue(4)
    output_queue.put([1])
    output_queue.wake()
    assert (await output_queue.take()).tokens == [1]  # the first ones never wait
    for tokens in ([2], [3, 4]):
        output_queue.put(tokens)
        output_queue.wake()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await output_queue.take()
    output_queue.put([5, 6])
    output_queue.wake()
    assert (await output_queue.take()).tokens == [2, 3, 4, 5, 6]
    output_queue.put([7])
    output_queue.end(Ending(sampling_pb2.FINISH_REASON_STOP))  # nor does the end
    output_queue.wake()
    output = await output_queue.take()
    assert (output.tokens, output.ending is not None) == ([7], True)
