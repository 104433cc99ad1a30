"""Target features on their way to the drafter: waiting, order, and tokens that come with them."""

from __future__ import annotations

import asyncio

import grpc

from paceline.target import TapSpec
from paceline.v1 import peer_pb2
from tests.drafter_service.conftest import Bench, commits, eventually, opening
from tests.drafter_service.feature_stage import (
    LAST,
    PROMPT,
    assert_silence,
    stage,
)
from tests.drafter_service.scripted import continuation


async def test_draft_waits_for_its_features(bench: Bench) -> None:
    on = await stage(bench, feature_wait_ms=5000)
    frame_id = await on.conductor.send(opens=[on.opening(1, PROMPT)])
    await eventually(lambda: on.verifier.num_streams)
    assert on.verifier.requests[0].subscriber_id == "drafter-under-test"
    on.verifier.push(1, 0, 2)
    on.verifier.push(1, 2, 1)  # positions 0 to 2 of 4 tokens: the root has not been run
    answer = await on.conductor.read()
    assert answer.frame_id == frame_id
    assert list(answer.drafts.tokens) == continuation(PROMPT, 2)
    await on.conductor.send(commits=commits((1, 4, [9, 10])))
    on.verifier.push(1, 3, 2)
    answer = await on.conductor.read()
    assert list(answer.drafts.starts) == [6]
    assert len(on.drafter.batches) == 2


async def test_tokens_that_come_with_features_are_drafted_from_before_the_commit(bench: Bench) -> None:
    on = await stage(bench, feature_wait_ms=5000)
    await on.conductor.send(opens=[on.opening(1, PROMPT)])
    await eventually(lambda: on.verifier.num_streams)
    on.verifier.push(1, 0, 3)
    await on.conductor.read_drafts()
    on.verifier.push(1, 3, 2, tokens=[9, 10])
    answer = await on.conductor.read()
    assert (answer.frame_id, list(answer.drafts.starts)) == (0, [6])
    assert list(answer.drafts.tokens) == continuation([*PROMPT, 9, 10], 2)
    frame_id = await on.conductor.send(commits=commits((1, 4, [9, 10])))
    answer = await on.conductor.read()
    assert (answer.frame_id, len(answer.drafts.sequence_ids)) == (frame_id, 0)
    assert len(on.drafter.batches) == 2
    # The commit may also be first; then its frame gets the draft.
    frame_id = await on.conductor.send(commits=commits((1, 6, [11])))
    on.verifier.push(1, 5, 1, tokens=[11])
    answer = await on.conductor.read()
    assert (answer.frame_id, list(answer.drafts.starts)) == (frame_id, [7])
    assert len(on.drafter.batches) == 3


async def test_sequences_of_one_step_are_drafted_for_together(bench: Bench) -> None:
    on = await stage(bench, feature_wait_ms=5000, feature_gather_ms=100)
    await on.conductor.send(opens=[on.opening(i, PROMPT) for i in (1, 2, 3)])
    await eventually(lambda: on.verifier.num_streams)
    for sequence_id in (1, 2, 3):
        on.verifier.push(sequence_id, 0, 3)
    await on.conductor.read_drafts()
    drafted = len(on.drafter.batches)
    for sequence_id in (1, 2, 3):  # one chunk each, as a verifier sends them
        on.verifier.push(sequence_id, 3, 1, tokens=[9])
        await asyncio.sleep(0.01)
    answer = await on.conductor.read_drafts()
    assert sorted(answer.drafts.sequence_ids) == [1, 2, 3]
    assert len(on.drafter.batches) == drafted + 1


async def test_a_draft_nobody_asked_for_does_not_answer_another_sequences_frame(bench: Bench) -> None:
    on = await stage(bench, feature_wait_ms=5000)
    await on.conductor.send(opens=[on.opening(1, PROMPT), on.opening(2, PROMPT)])
    await eventually(lambda: on.verifier.num_streams)
    for sequence_id in (1, 2):
        on.verifier.push(sequence_id, 0, 3)
    drafted: set[int] = set()
    while drafted != {1, 2}:
        drafted |= set((await on.conductor.read_drafts()).drafts.sequence_ids)
    frame_id = await on.conductor.send(commits=commits((2, 4, [9])))  # its features are still to come
    on.verifier.push(1, 3, 1, tokens=[9])
    answer = await on.conductor.read_drafts()
    assert (list(answer.drafts.sequence_ids), answer.frame_id) == ([1], 0)
    on.verifier.push(2, 3, 1, tokens=[9])
    answer = await on.conductor.read_drafts()
    assert (list(answer.drafts.sequence_ids), answer.frame_id) == ([2], frame_id)


async def test_nothing_is_answered_where_nothing_is_drafted(bench: Bench) -> None:
    on = await stage(bench, feature_wait_ms=5000)
    await on.conductor.send(opens=[on.opening(1, PROMPT)], policy=peer_pb2.StepPolicy(draft_length=0))
    await eventually(lambda: on.verifier.num_streams)
    on.verifier.push(1, 0, 3)
    assert not (await on.conductor.read()).drafts.sequence_ids
    for position in range(3, 9):
        on.verifier.push(1, position, 1, tokens=[9])
    frame_id = await on.conductor.send(commits=commits((1, 4, [9] * 6)))
    answer = await on.conductor.read()
    assert answer.frame_id == frame_id


async def test_a_text_of_one_token_waits_in_silence(bench: Bench) -> None:
    """Its only feature comes when the target has run it; until then there is nothing to draft from."""
    on = await stage(bench, feature_wait_ms=5000)
    frame_id = await on.conductor.send(opens=[on.opening(1, [5])])
    await eventually(lambda: on.verifier.num_streams)
    await asyncio.sleep(0.05)
    assert not on.drafter.batches
    on.verifier.push(1, 0, 1, tokens=[6])
    answer = await on.conductor.read()
    assert (answer.frame_id, list(answer.drafts.starts)) == (frame_id, [2])


async def test_tokens_past_a_gap_wait_for_the_commit(bench: Bench) -> None:
    on = await stage(bench, feature_wait_ms=5000)
    await on.conductor.send(opens=[on.opening(1, PROMPT)])
    await eventually(lambda: on.verifier.num_streams)
    on.verifier.push(1, 0, 3)
    await on.conductor.read_drafts()
    on.verifier.push(1, 3, 3, tokens=[10, 11])  # token 4 was committed by a step whose frame was lost here
    await on.conductor.send(commits=commits((1, 4, [9, 10, 11])))
    answer = await on.conductor.read_drafts()
    assert list(answer.drafts.starts) == [7]
    assert list(answer.drafts.tokens) == continuation([*PROMPT, 9, 10, 11], 2)


async def test_late_features_cost_an_empty_answer_and_draft_later(bench: Bench) -> None:
    on = await stage(bench, feature_wait_ms=20)
    frame_id = await on.conductor.send(opens=[on.opening(1, PROMPT)])
    answer = await on.conductor.read()
    assert answer.frame_id == frame_id
    assert not answer.drafts.sequence_ids
    assert answer.queue_us >= 20_000
    assert answer.wait_us < 20_000  # it waited for features, not for the drafter
    await eventually(lambda: on.verifier.num_streams)
    on.verifier.push(1, 0, 3)
    answer = await on.conductor.read()
    assert answer.frame_id == 0
    assert list(answer.drafts.tokens) == continuation(PROMPT, 2)


async def test_a_text_with_its_features_and_no_draft_is_asked_for_once(bench: Bench) -> None:
    on = await stage(bench, feature_wait_ms=5000)
    on.drafter.silent_after = {PROMPT[-1]}
    frame_id = await on.conductor.send(opens=[on.opening(1, PROMPT)])
    await eventually(lambda: on.verifier.num_streams)
    on.verifier.push(1, 0, 3)
    await assert_silence(on, frame_id)
    # Features of a longer text, as a drafter that joins late is sent them: they change nothing before its tokens come.
    on.verifier.push(1, 3, 2)
    await eventually(lambda: list(on.drafter.num_fed.values()) == [5])
    await assert_silence(on, await on.conductor.send())
    await on.conductor.send(commits=commits((1, 4, [9, 10])))
    answer = await on.conductor.read()
    assert list(answer.drafts.tokens) == continuation([*PROMPT, 9, 10], 2)


async def test_a_text_that_was_answered_without_features_is_drafted_for_when_they_come(bench: Bench) -> None:
    """Also where they come in pieces, the first of which leaves the drafter as silent as before."""
    on = await stage(bench, feature_wait_ms=5)
    frame_id = await on.conductor.send(opens=[on.opening(1, PROMPT)])
    answer = await on.conductor.read()
    assert (answer.frame_id, list(answer.drafts.sequence_ids)) == (frame_id, [])
    await eventually(lambda: on.verifier.num_streams)
    on.verifier.push(1, 0, 2)
    await eventually(lambda: list(on.drafter.num_fed.values()) == [2])
    frame_id = await on.conductor.send()
    assert (await on.conductor.read()).frame_id == frame_id
    on.verifier.push(1, 2, 1)
    answer = await on.conductor.read()
    assert (answer.frame_id, list(answer.drafts.tokens)) == (0, continuation(PROMPT, 2))


async def test_features_that_come_before_their_sequence_are_kept(bench: Bench) -> None:
    on = await stage(bench, feature_wait_ms=5000)
    await on.conductor.send(opens=[on.opening(1, PROMPT)])
    await eventually(lambda: on.verifier.num_streams)
    on.verifier.push(2, 0, 3)
    on.verifier.push(1, 0, 3)
    await on.conductor.read_drafts()  # so the chunk before has come in too
    await on.conductor.send(opens=[on.opening(2, [1, 2, 3, 4])])
    assert list((await on.conductor.read_drafts()).drafts.sequence_ids) == [2]


async def test_repeats_and_overlaps_are_cut_and_a_replay_heals_a_gap(bench: Bench) -> None:
    on = await stage(bench, feature_wait_ms=5000)
    await on.conductor.send(opens=[on.opening(1, PROMPT)])
    await eventually(lambda: on.verifier.num_streams)
    on.verifier.push(1, 0, 1)
    on.verifier.push(1, 2, 1)  # past a gap: dropped
    on.verifier.push(1, 0, 1)
    on.verifier.push(1, 0, 2)
    on.verifier.push(1, 1, 2)
    assert list((await on.conductor.read_drafts()).drafts.starts) == [4]
    assert list(on.drafter.num_fed.values()) == [3]


async def test_of_a_last_only_tap_one_row_a_round_is_all_there_is(bench: Bench) -> None:
    on = await stage(bench, tap=LAST, feature_wait_ms=5000)
    await on.conductor.send(opens=[on.opening(1, PROMPT)])
    await eventually(lambda: on.verifier.num_streams)
    on.verifier.push(1, 3, 1, tokens=[9])  # the prompt's step: position 3 is the one before the new root
    answer = await on.conductor.read_drafts()
    assert list(answer.drafts.starts) == [5]
    on.verifier.push(1, 6, 1, tokens=[10, 11, 12])  # three tokens, one row: positions 4 and 5 never come
    answer = await on.conductor.read_drafts()
    assert list(answer.drafts.tokens) == continuation([*PROMPT, 9, 10, 11, 12], 2)
    on.verifier.push(1, 6, 1)  # once more, as after a reconnection
    await on.conductor.send(commits=commits((1, 5, [10, 11, 12]), (1, 8, [13])))
    on.verifier.push(1, 7, 1, tokens=[13])
    assert list((await on.conductor.read_drafts()).drafts.starts) == [9]
    assert list(on.drafter.num_fed.values()) == [8]


async def test_last_only_features_of_a_longer_text_wait_for_its_tokens(bench: Bench) -> None:
    """A drafter that joins late is sent the newest row without tokens; the conductor's commits follow."""
    on = await stage(bench, tap=LAST, feature_wait_ms=20, feature_loss_s=0.2)
    await on.conductor.send(opens=[on.opening(1, PROMPT)])
    await eventually(lambda: on.verifier.num_streams)
    on.verifier.push(1, 6, 1)
    await asyncio.sleep(0.3)  # longer than what counts as a loss: the features are there, the tokens are not
    assert not (await on.conductor.read()).failures
    assert not any(entry for entry in on.drafter.batches if len(entry) > 1)
    await on.conductor.send(commits=commits((1, 4, [9, 10, 11, 12])))
    answer = await on.conductor.read_drafts()
    assert list(answer.drafts.starts) == [8]
    assert list(answer.drafts.tokens) == continuation([*PROMPT, 9, 10, 11, 12], 2)


async def test_optional_features_are_read_where_a_sequence_asks(bench: Bench) -> None:
    """Two sequences of one text: one waits for its features, the other names no verifier and needs none."""
    on = await stage(bench, tap=TapSpec(layers=(1, 2), is_optional=True), feature_wait_ms=5000)
    without = opening(2, PROMPT, reads_features=False)
    await on.conductor.send(opens=[on.opening(1, PROMPT, reads_features=True), without])
    answer = await on.conductor.read_drafts()
    assert list(answer.drafts.sequence_ids) == [2]
    assert list(answer.drafts.tokens) == continuation(PROMPT, 2)
    await eventually(lambda: on.verifier.num_streams)
    on.verifier.push(2, 0, 3)  # nobody asked for these
    on.verifier.push(1, 0, 3)
    assert list((await on.conductor.read_drafts()).drafts.sequence_ids) == [1]
    assert sorted(on.drafter.num_fed.values()) == [0, 3]
    # What is committed is drafted from at once.
    await on.conductor.send(commits=commits((2, 4, [9])))
    assert list((await on.conductor.read_drafts()).drafts.tokens) == continuation([*PROMPT, 9], 2)
    assert [r.reads_features for batch in on.drafter.batches for r in batch] == [False, True, False]


async def test_features_that_cannot_be_done_without_are_not_left_out(bench: Bench) -> None:
    on = await stage(bench)
    await on.conductor.send(opens=[on.opening(1, PROMPT, reads_features=False)])
    [failure] = (await on.conductor.read()).failures
    assert failure.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert "reads_features: must not be false" in failure.message
