"""Drafting ahead: longer drafts, and drafts for the likely verification outcomes."""

from __future__ import annotations

import pytest

from paceline.v1 import peer_pb2, sampling_pb2
from tests.drafter_service.conftest import Bench, commits, eventually, opening
from tests.drafter_service.scripted import VOCAB_SIZE, ScriptedDrafter, continuation

PROMPT = [5, 6, 7]


async def test_drafting_ahead_sends_the_longer_chain(bench: Bench) -> None:
    conductor = await bench.serve(ScriptedDrafter())
    policy = peer_pb2.StepPolicy(draft_length=2, draft_ahead=5)
    frame_id = await conductor.send(opens=[opening(1, PROMPT)], policy=policy)
    first, second = await conductor.read(), await conductor.read()
    assert (first.frame_id, list(first.drafts.tokens)) == (frame_id, continuation(PROMPT, 2))
    assert (second.frame_id, list(second.drafts.tokens)) == (0, continuation(PROMPT, 7))
    assert list(second.drafts.starts) == [3]


async def test_drafting_ahead_for_outcomes_sends_whole_paths_once(bench: Bench) -> None:
    drafter = ScriptedDrafter()
    conductor = await bench.serve(drafter)
    policy = peer_pb2.StepPolicy(draft_length=2, draft_ahead=3, num_outcomes=2)
    frame_id = await conductor.send(opens=[opening(1, PROMPT)], policy=policy)
    first, second = await conductor.read(), await conductor.read()
    assert (first.frame_id, list(first.drafts.tokens)) == (frame_id, continuation(PROMPT, 2))
    assert drafter.batches[0][0].max_nodes == 3  # a tree, whose outcomes are known
    assert (second.frame_id, list(second.drafts.starts), list(second.drafts.sizes)) == (0, [3], [9])
    good, *_ = continuation(PROMPT, 1)
    wrong = (good + 1) % VOCAB_SIZE
    paths = [wrong, *continuation([*PROMPT, wrong], 3)]
    assert list(second.drafts.tokens[:4]) == paths
    assert list(second.drafts.parents) == [-1, 0, 1, 2, -1, 4, 5, 6, 7]
    await conductor.send(commits=commits((1, 3, [wrong])))
    third, fourth = await conductor.read(), await conductor.read()
    assert (list(third.drafts.starts), list(fourth.drafts.starts)) == ([4], [4])
    assert [len(batch) for batch in drafter.outcome_batches] == [1, 1]


async def test_another_partition_drafts_its_outcomes_alone(bench: Bench) -> None:
    drafter = ScriptedDrafter()
    conductor = await bench.serve(drafter)
    policy = peer_pb2.StepPolicy(draft_length=2, draft_ahead=3, num_outcomes=4)
    frame_id = await conductor.send(opens=[opening(1, PROMPT, partition=1, num_partitions=3)], policy=policy)
    first, second = await conductor.read(), await conductor.read()
    assert first.frame_id == frame_id
    assert not first.drafts.sequence_ids
    assert list(second.drafts.tokens[:1]) == continuation(PROMPT, 1)  # outcome 1: one right token, one wrong
    assert list(second.drafts.sizes) == [5]


async def test_outcomes_are_drafted_for_again_when_another_sequence_stopped_them(bench: Bench) -> None:
    drafter = ScriptedDrafter()
    conductor = await bench.serve(drafter)
    other = [30, 31]
    policy = peer_pb2.StepPolicy(draft_length=2, draft_ahead=3, num_outcomes=2)
    await conductor.send(opens=[opening(2, other)], policy=policy)
    assert [list((await conductor.read()).drafts.starts) for _ in range(2)] == [[2], [2]]
    drafter.may_finish_outcomes.clear()
    await conductor.send(opens=[opening(1, PROMPT)])
    assert list((await conductor.read()).drafts.tokens) == continuation(PROMPT, 2)
    await eventually(lambda: len(drafter.outcome_batches) == 2)
    await conductor.send(commits=commits((2, 2, [32])))
    assert list((await conductor.read()).drafts.tokens) == continuation([*other, 32], 2)
    drafter.may_finish_outcomes.set()
    paths = await conductor.read()
    assert sorted(paths.drafts.starts) == [3, 3]
    await conductor.send()  # nothing is left to be done, nor done twice
    assert not (await conductor.read()).drafts.sequence_ids
    own = [[request.sequence_id for request in batch] for batch in drafter.outcome_batches]
    assert len(own[1]) == 1
    assert own[1][0] in own[-1]


@pytest.mark.parametrize(
    ("partition", "num_partitions"), [(1, 0), (1, 1), (3, 3), (0, 65), (2**31, 2**32 - 1)]
)
async def test_partitions_out_of_range_are_refused(bench: Bench, partition: int, num_partitions: int) -> None:
    conductor = await bench.serve(ScriptedDrafter())
    await conductor.send(opens=[opening(1, PROMPT, partition=partition, num_partitions=num_partitions)])
    (failure,) = (await conductor.read()).failures
    assert "partition" in failure.message


async def test_outcomes_that_fail_cost_nothing_but_themselves(bench: Bench) -> None:
    drafter = ScriptedDrafter()
    drafter.broken_outcomes.add(PROMPT[0])
    conductor = await bench.serve(drafter)
    policy = peer_pb2.StepPolicy(draft_length=2, draft_ahead=3, num_outcomes=2)
    await conductor.send(opens=[opening(1, PROMPT)], policy=policy)
    assert list((await conductor.read()).drafts.tokens) == continuation(PROMPT, 2)
    await conductor.send(commits=commits((1, 3, [11])))
    answer = await conductor.read()
    assert list(answer.drafts.tokens) == continuation([*PROMPT, 11], 2)
    assert not answer.failures


async def test_modes_that_verify_draws_only_lengthen_the_draft(bench: Bench) -> None:
    drafter = ScriptedDrafter()
    conductor = await bench.serve(drafter)
    drawn = sampling_pb2.SamplingParams(temperature=1.0, seed=1, mode=sampling_pb2.VERIFY_MODE_REJECTION)
    policy = peer_pb2.StepPolicy(draft_length=2, draft_ahead=2, num_outcomes=2)
    await conductor.send(opens=[opening(1, PROMPT, sampling=drawn)], policy=policy)
    assert list((await conductor.read()).drafts.sizes) == [2]
    assert list((await conductor.read()).drafts.sizes) == [4]
    assert not drafter.outcome_batches
