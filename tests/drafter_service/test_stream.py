"""The Draft stream with a scripted drafter: what is answered, and how a stream ends."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from paceline.v1 import drafter_pb2, peer_pb2
from tests.drafter_service.conftest import Bench, commits, eventually, opening
from tests.drafter_service.scripted import ScriptedDrafter, continuation

PROMPT = [5, 6, 7]


async def test_opening_and_commits_are_answered_with_drafts(bench: Bench) -> None:
    drafter = ScriptedDrafter()
    conductor = await bench.serve(drafter)
    assert conductor.hello.hello.method == "scripted"
    frame_id = await conductor.send(opens=[opening(9, PROMPT)], policy=peer_pb2.StepPolicy(draft_length=3))
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
        opens=[opening(i, [i]) for i in (1, 2, 3)], policy=peer_pb2.StepPolicy(draft_length=2)
    )
    answer = await conductor.read()
    assert sorted(answer.drafts.sequence_ids) == [1, 2, 3]
    assert [len(batch) for batch in drafter.batches] == [3]


async def test_a_text_without_a_draft_is_asked_for_once(bench: Bench) -> None:
    drafter = ScriptedDrafter()
    drafter.silent_after = {40}
    conductor = await bench.serve(drafter)
    await conductor.send(opens=[opening(1, PROMPT)], policy=peer_pb2.StepPolicy(draft_length=2))
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
    await conductor.send(opens=[opening(1, PROMPT)], policy=peer_pb2.StepPolicy(draft_length=0))
    answer = await conductor.read()
    assert answer.frame_id == 2
    assert not answer.drafts.sequence_ids
    frame_id = await conductor.send(policy=peer_pb2.StepPolicy(draft_length=2))
    assert (await conductor.read()).frame_id == frame_id


async def test_a_draft_says_how_long_the_drafter_was_busy_with_others(bench: Bench) -> None:
    drafter = ScriptedDrafter()
    conductor = await bench.serve(drafter)
    await conductor.send(opens=[opening(1, PROMPT)], policy=peer_pb2.StepPolicy(draft_length=2))
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


async def test_request_bounds_what_is_drafted(bench: Bench) -> None:
    conductor = await bench.serve(ScriptedDrafter())
    policy = peer_pb2.StepPolicy(draft_length=6, draft_ahead=6)
    await conductor.send(opens=[opening(1, PROMPT, max_draft_tokens=2)], policy=policy)
    assert list((await conductor.read()).drafts.sizes) == [2]
    frame_id = await conductor.send()
    answer = await conductor.read()
    assert answer.frame_id == frame_id
    assert not answer.drafts.sizes


async def test_drafter_that_is_behind_skips_to_the_newest_commit(bench: Bench) -> None:
    drafter = ScriptedDrafter()
    conductor = await bench.serve(drafter)
    await conductor.send(opens=[opening(1, PROMPT)], policy=peer_pb2.StepPolicy(draft_length=2))
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
