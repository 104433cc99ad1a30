"""Sequences in the drafter: opened again, given back, and refused one by one."""

from __future__ import annotations

import grpc
import pytest

from paceline.v1 import drafter_pb2, peer_pb2, sampling_pb2
from tests.drafter_service.conftest import Bench, commits, opening
from tests.drafter_service.scripted import ScriptedDrafter, continuation

PROMPT = [5, 6, 7]


async def test_old_epochs_are_ignored(bench: Bench) -> None:
    drafter = ScriptedDrafter()
    conductor = await bench.serve(drafter)
    await conductor.send(opens=[opening(1, PROMPT, epoch=2)], policy=peer_pb2.StepPolicy(draft_length=2))
    await conductor.read()
    await conductor.send(commits=commits((1, 3, [11]), epoch=1))
    assert not (await conductor.read()).drafts.sequence_ids
    assert list(drafter.texts.values()) == [PROMPT]


async def test_opening_again_replaces_the_sequence(bench: Bench) -> None:
    drafter = ScriptedDrafter()
    conductor = await bench.serve(drafter)
    await conductor.send(opens=[opening(1, PROMPT, epoch=1)], policy=peer_pb2.StepPolicy(draft_length=2))
    await conductor.read()
    await conductor.send(opens=[opening(1, [8, 9], epoch=2)], closes=[1])
    answer = await conductor.read()
    assert list(answer.drafts.epochs) == [2]
    assert list(answer.drafts.tokens) == continuation([8, 9], 2)
    assert list(drafter.texts.values()) == [[8, 9]]


async def test_commit_gap_gives_the_sequence_back(bench: Bench) -> None:
    drafter = ScriptedDrafter()
    conductor = await bench.serve(drafter)
    await conductor.send(opens=[opening(1, PROMPT)])
    await conductor.read()
    await conductor.send(commits=commits((1, 5, [1])))
    (failure,) = (await conductor.read()).failures
    assert (failure.sequence_id, failure.reason) == (1, "COMMIT_GAP")
    assert not drafter.texts


async def test_repeated_commit_adds_nothing_twice(bench: Bench) -> None:
    drafter = ScriptedDrafter()
    conductor = await bench.serve(drafter)
    await conductor.send(opens=[opening(1, PROMPT)])
    await conductor.read()
    await conductor.send(commits=commits((1, 3, [1, 2])))
    await conductor.read()
    await conductor.send(commits=commits((1, 3, [1, 2]), (1, 4, [2, 3])))
    await conductor.read()
    assert list(drafter.texts.values()) == [[*PROMPT, 1, 2, 3]]


async def test_sequence_that_outgrows_the_drafter_is_given_back(bench: Bench) -> None:
    drafter = ScriptedDrafter(max_positions=6)
    conductor = await bench.serve(drafter)
    await conductor.send(opens=[opening(1, PROMPT), opening(2, [1] * 6)])
    answer = await conductor.read()
    assert [(f.sequence_id, f.reason) for f in answer.failures] == [(2, "OUT_OF_POSITIONS")]
    assert list(answer.drafts.sizes) == [3]  # no further than its positions
    await conductor.send(commits=commits((1, 3, [1, 2, 3])))
    answer = await conductor.read()
    assert [(f.sequence_id, f.reason) for f in answer.failures] == [(1, "OUT_OF_POSITIONS")]
    assert not drafter.texts


async def test_full_drafter_gives_the_sequence_back(bench: Bench) -> None:
    drafter = ScriptedDrafter()
    conductor = await bench.serve(drafter, max_sequences=2)
    await conductor.send(opens=[opening(i, PROMPT) for i in (1, 2, 3)])
    answer = await conductor.read()
    assert [(f.sequence_id, f.reason) for f in answer.failures] == [(3, "CAPACITY_EXHAUSTED")]
    assert sorted(answer.drafts.sequence_ids) == [1, 2]


@pytest.mark.parametrize(
    "bad",
    [
        opening(0, PROMPT),
        opening(2, []),
        opening(2, [97]),
        opening(2, PROMPT, max_draft_tokens=0),
        opening(2, PROMPT, max_draft_tokens=65),
        opening(2, PROMPT, reads_features=True),
        opening(2, PROMPT, sampling=sampling_pb2.SamplingParams(temperature=-1.0)),
        opening(2, PROMPT, sampling=sampling_pb2.SamplingParams(top_p=float("nan"))),
    ],
)
async def test_bad_opening_costs_only_itself(bench: Bench, bad: drafter_pb2.OpenDraftSequence) -> None:
    conductor = await bench.serve(ScriptedDrafter())
    await conductor.send(opens=[bad, opening(1, PROMPT)])
    answer = await conductor.read()
    assert [f.sequence_id for f in answer.failures] == [bad.sequence_id]
    assert answer.failures[0].code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert list(answer.drafts.sequence_ids) == [1]


async def test_sequence_on_which_the_drafter_raises_costs_only_itself(bench: Bench) -> None:
    drafter = ScriptedDrafter()
    drafter.broken_prompts.add(13)
    conductor = await bench.serve(drafter)
    await conductor.send(opens=[opening(1, PROMPT), opening(2, [13]), opening(3, [4])])
    answer = await conductor.read()
    assert sorted(answer.drafts.sequence_ids) == [1, 3]
    assert [(f.sequence_id, f.reason) for f in answer.failures] == [(2, "DRAFT_FAILED")]
    assert len(drafter.texts) == 2
