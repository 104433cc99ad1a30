"""The Draft stream with a scripted drafter: what is answered, what is refused, and what is let go of."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from paceline.v1 import drafter_pb2, sampling_pb2
from tests.drafter_service.conftest import Bench, commits, eventually, opening
from tests.drafter_service.scripted import VOCAB_SIZE, ScriptedDrafter, continuation

PROMPT = [5, 6, 7]


async def test_opening_and_commits_are_answered_with_drafts(bench: Bench) -> None:
    drafter = ScriptedDrafter()
    conductor = await bench.serve(drafter)
    assert conductor.hello.hello.method == "scripted"
    frame_id = await conductor.send(opens=[opening(9, PROMPT)], plan=drafter_pb2.DraftPlan(draft_length=3))
    answer = await conductor.read()
    assert answer.frame_id == frame_id
    assert list(answer.drafts.sequence_ids) == [9]
    assert list(answer.drafts.epochs) == [1]
    assert list(answer.drafts.starts) == [3]
    assert list(answer.drafts.tokens) == continuation(PROMPT, 3)
    assert list(answer.drafts.parents) == [-1, 0, 1]
    assert (answer.num_draft_steps, answer.num_sequences) == (3, 1)
    text = [*PROMPT, *continuation(PROMPT, 2)]
    frame_id = await conductor.send(commits=commits((9, 3, text[3:])))
    answer = await conductor.read()
    assert answer.frame_id == frame_id
    assert list(answer.drafts.starts) == [5]
    assert list(answer.drafts.tokens) == continuation(text, 3)


async def test_sequences_are_drafted_for_together(bench: Bench) -> None:
    drafter = ScriptedDrafter()
    conductor = await bench.serve(drafter)
    await conductor.send(
        opens=[opening(i, [i]) for i in (1, 2, 3)], plan=drafter_pb2.DraftPlan(draft_length=2)
    )
    answer = await conductor.read()
    assert sorted(answer.drafts.sequence_ids) == [1, 2, 3]
    assert [len(batch) for batch in drafter.batches] == [3]


async def test_a_text_without_a_draft_is_asked_for_once(bench: Bench) -> None:
    drafter = ScriptedDrafter()
    drafter.silent_after = {40}
    conductor = await bench.serve(drafter)
    await conductor.send(opens=[opening(1, PROMPT)], plan=drafter_pb2.DraftPlan(draft_length=2))
    await conductor.read_drafts()
    frame_id = await conductor.send(commits=commits((1, 3, [40])))
    answer = await conductor.read()
    assert (answer.frame_id, list(answer.drafts.sequence_ids)) == (frame_id, [])
    num_asked = len(drafter.batches)
    for _ in range(3):  # turns of the loop, each of which would ask again
        frame_id = await conductor.send()
        assert (await conductor.read()).frame_id == frame_id
    assert len(drafter.batches) == num_asked
    await conductor.send(commits=commits((1, 4, [41])))
    answer = await conductor.read()
    assert list(answer.drafts.starts) == [5]
    assert list(answer.drafts.tokens) == continuation([*PROMPT, 40, 41], 2)


async def test_every_frame_is_answered(bench: Bench) -> None:
    conductor = await bench.serve(ScriptedDrafter())
    frame_id = await conductor.send()
    answer = await conductor.read()
    assert answer.frame_id == frame_id
    assert not answer.drafts.sequence_ids
    await conductor.send(opens=[opening(1, PROMPT)], plan=drafter_pb2.DraftPlan(draft_length=0))
    answer = await conductor.read()
    assert answer.frame_id == 2
    assert not answer.drafts.sequence_ids
    frame_id = await conductor.send(plan=drafter_pb2.DraftPlan(draft_length=2))
    assert (await conductor.read()).frame_id == frame_id


async def test_a_draft_says_how_long_the_drafter_was_busy_with_others(bench: Bench) -> None:
    drafter = ScriptedDrafter()
    conductor = await bench.serve(drafter)
    await conductor.send(opens=[opening(1, PROMPT)], plan=drafter_pb2.DraftPlan(draft_length=2))
    assert (await conductor.read()).wait_us < 20_000
    drafter.may_draft.clear()
    await conductor.send(commits=commits((1, 3, [40])))
    await conductor.send(opens=[opening(2, [30, 31])])
    await asyncio.sleep(0.05)
    drafter.may_draft.set()
    first, second = await conductor.read(), await conductor.read()
    assert (list(first.drafts.starts), list(second.drafts.starts)) == ([4], [2])
    assert first.wait_us < 20_000
    assert second.wait_us >= 20_000


async def test_drafting_ahead_sends_the_longer_chain(bench: Bench) -> None:
    conductor = await bench.serve(ScriptedDrafter())
    plan = drafter_pb2.DraftPlan(draft_length=2, draft_ahead=5)
    frame_id = await conductor.send(opens=[opening(1, PROMPT)], plan=plan)
    first, second = await conductor.read(), await conductor.read()
    assert (first.frame_id, list(first.drafts.tokens)) == (frame_id, continuation(PROMPT, 2))
    assert (second.frame_id, list(second.drafts.tokens)) == (0, continuation(PROMPT, 7))
    assert list(second.drafts.starts) == [3]


async def test_drafting_past_outcomes_sends_whole_paths_once(bench: Bench) -> None:
    drafter = ScriptedDrafter()
    conductor = await bench.serve(drafter)
    plan = drafter_pb2.DraftPlan(draft_length=2, draft_ahead=3, outcomes=2)
    frame_id = await conductor.send(opens=[opening(1, PROMPT)], plan=plan)
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


async def test_a_further_share_drafts_its_outcomes_alone(bench: Bench) -> None:
    drafter = ScriptedDrafter()
    conductor = await bench.serve(drafter)
    plan = drafter_pb2.DraftPlan(draft_length=2, draft_ahead=3, outcomes=4)
    frame_id = await conductor.send(opens=[opening(1, PROMPT, partition=1, num_partitions=3)], plan=plan)
    first, second = await conductor.read(), await conductor.read()
    assert first.frame_id == frame_id
    assert not first.drafts.sequence_ids
    assert list(second.drafts.tokens[:1]) == continuation(PROMPT, 1)  # outcome 1: one right token, one wrong
    assert list(second.drafts.sizes) == [5]


async def test_outcomes_are_taken_up_again_when_another_sequence_broke_them_off(bench: Bench) -> None:
    drafter = ScriptedDrafter()
    conductor = await bench.serve(drafter)
    other = [30, 31]
    plan = drafter_pb2.DraftPlan(draft_length=2, draft_ahead=3, outcomes=2)
    await conductor.send(opens=[opening(2, other)], plan=plan)
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
async def test_shares_out_of_range_are_refused(bench: Bench, partition: int, num_partitions: int) -> None:
    conductor = await bench.serve(ScriptedDrafter())
    await conductor.send(opens=[opening(1, PROMPT, partition=partition, num_partitions=num_partitions)])
    (failure,) = (await conductor.read()).failures
    assert "partition" in failure.message


async def test_outcomes_that_fail_cost_nothing_but_themselves(bench: Bench) -> None:
    drafter = ScriptedDrafter()
    drafter.broken_outcomes.add(PROMPT[0])
    conductor = await bench.serve(drafter)
    plan = drafter_pb2.DraftPlan(draft_length=2, draft_ahead=3, outcomes=2)
    await conductor.send(opens=[opening(1, PROMPT)], plan=plan)
    assert list((await conductor.read()).drafts.tokens) == continuation(PROMPT, 2)
    await conductor.send(commits=commits((1, 3, [11])))
    answer = await conductor.read()
    assert list(answer.drafts.tokens) == continuation([*PROMPT, 11], 2)
    assert not answer.failures


async def test_modes_that_verify_draws_go_on_from_the_end_alone(bench: Bench) -> None:
    drafter = ScriptedDrafter()
    conductor = await bench.serve(drafter)
    drawn = sampling_pb2.SamplingParams(temperature=1.0, seed=1, mode=sampling_pb2.VERIFY_MODE_REJECTION)
    plan = drafter_pb2.DraftPlan(draft_length=2, draft_ahead=2, outcomes=2)
    await conductor.send(opens=[opening(1, PROMPT, sampling=drawn)], plan=plan)
    assert list((await conductor.read()).drafts.sizes) == [2]
    assert list((await conductor.read()).drafts.sizes) == [4]
    assert not drafter.outcome_batches


async def test_request_bounds_what_is_drafted(bench: Bench) -> None:
    conductor = await bench.serve(ScriptedDrafter())
    plan = drafter_pb2.DraftPlan(draft_length=6, draft_ahead=6)
    await conductor.send(opens=[opening(1, PROMPT, max_draft_tokens=2)], plan=plan)
    assert list((await conductor.read()).drafts.sizes) == [2]
    frame_id = await conductor.send()
    answer = await conductor.read()
    assert answer.frame_id == frame_id
    assert not answer.drafts.sizes


async def test_drafter_that_is_behind_skips_to_the_newest_commit(bench: Bench) -> None:
    drafter = ScriptedDrafter()
    conductor = await bench.serve(drafter)
    await conductor.send(opens=[opening(1, PROMPT)], plan=drafter_pb2.DraftPlan(draft_length=2))
    await conductor.read()
    drafter.may_draft.clear()
    text = [*PROMPT, *continuation(PROMPT, 6)]
    await conductor.send(commits=commits((1, 3, text[3:4])))
    await eventually(lambda: len(next(iter(drafter.texts.values()))) == 4)  # it is busy with this one
    for start in range(4, 9):
        await conductor.send(commits=commits((1, start, text[start : start + 1])))
    other = await bench.connect()  # its hello needs no loop; when it is here, so are the frames before it
    assert other.hello.HasField("hello")
    drafter.may_draft.set()
    answers = [await conductor.read()]
    while answers[-1].drafts.starts[-1] != 9:
        answers.append(await conductor.read())
    assert len(answers) < 6
    assert answers[-1].frame_id == 7
    assert list(answers[-1].drafts.tokens) == continuation(text, 2)


async def test_old_epochs_are_ignored(bench: Bench) -> None:
    drafter = ScriptedDrafter()
    conductor = await bench.serve(drafter)
    await conductor.send(opens=[opening(1, PROMPT, epoch=2)], plan=drafter_pb2.DraftPlan(draft_length=2))
    await conductor.read()
    await conductor.send(commits=commits((1, 3, [11]), epoch=1))
    assert not (await conductor.read()).drafts.sequence_ids
    assert list(drafter.texts.values()) == [PROMPT]


async def test_opening_again_replaces_the_sequence(bench: Bench) -> None:
    drafter = ScriptedDrafter()
    conductor = await bench.serve(drafter)
    await conductor.send(opens=[opening(1, PROMPT, epoch=1)], plan=drafter_pb2.DraftPlan(draft_length=2))
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


async def test_closed_stream_frees_everything(bench: Bench) -> None:
    drafter = ScriptedDrafter()
    conductor = await bench.serve(drafter)
    other = await bench.connect()
    await conductor.send(opens=[opening(i, PROMPT) for i in (1, 2, 3)])
    await conductor.read()
    await other.send(opens=[opening(1, [8])])  # the same id on another stream is another sequence
    await other.read()
    assert len(drafter.texts) == 4
    conductor.close()
    await eventually(lambda: list(drafter.texts.values()) == [[8]])


async def test_lease_that_runs_out_frees_everything(bench: Bench) -> None:
    drafter = ScriptedDrafter()
    await bench.serve(drafter)
    conductor = await bench.connect(lease_ms=1000)
    await conductor.send(opens=[opening(1, PROMPT)])
    await conductor.read()
    with pytest.raises(grpc.aio.AioRpcError, match="lease") as raised:
        await conductor.read()
    assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    await eventually(lambda: not drafter.texts)


@pytest.mark.parametrize(
    ("hello", "status"),
    [
        ({"protocol_version": 99}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"lease_ms": 1}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_bad_hello_is_refused(bench: Bench, hello: dict[str, int], status: grpc.StatusCode) -> None:
    await bench.serve(ScriptedDrafter())
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await bench.connect(**hello)
    assert raised.value.code() is status


async def test_stream_without_hello_is_refused(bench: Bench) -> None:
    await bench.serve(ScriptedDrafter())
    call = bench.stub.Draft(iter([drafter_pb2.DraftRequest(frame_id=1)]))
    with pytest.raises(grpc.aio.AioRpcError, match="hello") as raised:
        async for _ in call:
            pass
    assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_malformed_commits_end_the_stream(bench: Bench) -> None:
    drafter = ScriptedDrafter()
    conductor = await bench.serve(drafter)
    await conductor.send(opens=[opening(1, PROMPT)])
    await conductor.read()
    await conductor.send(commits=commits((1, 3, [97])))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await conductor.read()
    assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    await eventually(lambda: not drafter.texts)
