"""Target features on their way to the drafter: waiting, order, loss, and verifiers that are not who they should be."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
import torch

from paceline.target import TapSpec
from paceline.v1 import drafter_pb2, peer_pb2
from tests.drafter_service.conftest import Bench, Conductor, commits, drafter_info, eventually, opening
from tests.drafter_service.scripted import WIDTH, ScriptedDrafter, ScriptedFeatures, continuation

PROMPT = [5, 6, 7, 8]
TAP = TapSpec(layers=(1, 2))
LAST = TapSpec(norm_final=True, last_only=True)


class Stage:
    """A drafter that reads features, and a verifier that sends them when told."""

    def __init__(self, drafter: ScriptedDrafter, verifier: ScriptedFeatures, conductor: Conductor) -> None:
        self.drafter = drafter
        self.verifier = verifier
        self.conductor = conductor

    def opening(self, sequence_id: int, tokens: list[int], **fields: Any) -> drafter_pb2.OpenDraftSequence:
        return opening(
            sequence_id,
            tokens,
            **({"verifier_endpoint": self.verifier.endpoint, "verifier_instance_id": "verifier-1"} | fields),
        )


async def stage(
    bench: Bench, verifier_info: dict[str, Any] | None = None, tap: TapSpec = TAP, **settings: Any
) -> Stage:
    drafter = ScriptedDrafter(tap=tap)
    info = drafter_info(drafter)
    fields = {"instance_id": "verifier-1", "model_fingerprint": info.model_fingerprint, "tap": info.tap}
    verifier = ScriptedFeatures(peer_pb2.PeerInfo(**(fields | (verifier_info or {}))))
    await verifier.start()
    bench.stack.push_async_callback(verifier.stop)
    conductor = await bench.serve(drafter, info, **settings)
    await conductor.send(plan=drafter_pb2.DraftPlan(draft_length=2))
    await conductor.read()
    return Stage(drafter, verifier, conductor)


async def assert_the_first_is_lost_and_the_second_drafted(on: Stage) -> None:
    failures: list[peer_pb2.SequenceFailure] = []
    drafted: list[int] = []
    while not (failures and drafted):
        answer = await on.conductor.read()
        failures.extend(answer.failures)
        drafted.extend(answer.drafts.sequence_ids)
    assert [(f.sequence_id, f.reason) for f in failures] == [(1, "FEATURES_LOST")]
    assert drafted == [2]


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
    await on.conductor.send(opens=[on.opening(1, PROMPT)], plan=drafter_pb2.DraftPlan(draft_length=0))
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


@pytest.mark.parametrize("tokens", [[9, 10, 11], [1 << 30]])
async def test_malformed_tokens_beside_features_cost_only_their_sequence(
    bench: Bench, tokens: list[int]
) -> None:
    on = await stage(bench, feature_wait_ms=5000)
    await on.conductor.send(opens=[on.opening(1, PROMPT), on.opening(2, PROMPT)])
    await eventually(lambda: on.verifier.num_streams)
    on.verifier.push(1, 0, 2, tokens=tokens)
    on.verifier.push(2, 0, 3)
    await assert_the_first_is_lost_and_the_second_drafted(on)


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


async def assert_silence(on: Stage, frame_id: int) -> None:
    """The frame has an empty answer, and so have the next ones, without the drafter being asked."""
    answer = await on.conductor.read()
    assert (answer.frame_id, list(answer.drafts.sequence_ids)) == (frame_id, [])
    for _ in range(3):  # turns of the loop, each of which would ask again
        frame_id = await on.conductor.send()
        assert (await on.conductor.read()).frame_id == frame_id
    assert len(on.drafter.batches) == 1


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


async def test_stream_that_breaks_is_opened_again(bench: Bench) -> None:
    on = await stage(bench, feature_wait_ms=5000)
    await on.conductor.send(opens=[on.opening(1, PROMPT)])
    await eventually(lambda: on.verifier.num_streams)
    on.verifier.push(1, 0, 1)
    on.verifier.break_streams()
    await eventually(lambda: len(on.verifier.requests) == 2 and on.verifier.num_streams == 1)
    on.verifier.push(1, 0, 3)
    assert list((await on.conductor.read_drafts()).drafts.starts) == [4]


async def test_features_that_stop_coming_give_the_sequence_back(bench: Bench) -> None:
    on = await stage(bench, feature_wait_ms=5, feature_loss_s=0.2)
    await on.conductor.send(opens=[on.opening(1, PROMPT)])
    await eventually(lambda: on.verifier.num_streams)
    on.verifier.push(1, 0, 3)
    await on.conductor.read_drafts()
    await on.conductor.send(commits=commits((1, 4, [9])))
    while not (answer := await on.conductor.read()).failures:
        continue
    assert [(f.sequence_id, f.reason) for f in answer.failures] == [(1, "FEATURES_LOST")]
    assert not on.drafter.texts


async def test_sequence_whose_prefill_has_not_begun_is_kept(bench: Bench) -> None:
    on = await stage(bench, feature_wait_ms=5, feature_loss_s=0.05)
    await on.conductor.send(opens=[on.opening(1, PROMPT)])
    assert not (await on.conductor.read()).failures
    await eventually(lambda: on.verifier.num_streams)
    for _ in range(10):  # ten answers take longer than the loss bound would
        await on.conductor.send(opens=[on.opening(2, PROMPT)], closes=[2])
        assert not (await on.conductor.read()).failures
    on.verifier.push(1, 0, 3)
    assert list((await on.conductor.read_drafts()).drafts.sequence_ids) == [1]


async def test_restarted_verifier_gives_its_sequences_back(bench: Bench) -> None:
    on = await stage(bench, feature_wait_ms=5000)
    await on.conductor.send(opens=[on.opening(1, PROMPT)])
    await eventually(lambda: on.verifier.num_streams)
    await on.verifier.restart("verifier-2")
    answer = await on.conductor.read()
    assert [(f.sequence_id, f.reason) for f in answer.failures] == [(1, "FEATURES_LOST")]
    await on.conductor.send(opens=[on.opening(1, [1, 2], epoch=2, verifier_instance_id="verifier-2")])
    await eventually(lambda: on.verifier.num_streams)
    on.verifier.push(1, 0, 1)
    assert list((await on.conductor.read_drafts()).drafts.epochs) == [2]


@pytest.mark.parametrize(
    "verifier_info", [{"model_fingerprint": "0" * 64}, {"tap": peer_pb2.FeatureTap(layers=[3], width=WIDTH)}]
)
async def test_verifier_with_another_target_or_tap_is_refused(
    bench: Bench, verifier_info: dict[str, Any]
) -> None:
    on = await stage(bench, verifier_info, feature_wait_ms=5000)
    await on.conductor.send(opens=[on.opening(1, PROMPT)])
    answer = await on.conductor.read()
    assert [(f.sequence_id, f.reason) for f in answer.failures] == [(1, "INCOMPATIBLE_PEER")]
    assert not on.verifier.requests


@pytest.mark.parametrize(
    "rows",
    [
        torch.zeros(3, WIDTH + 1),
        torch.full((3, WIDTH), float("nan")),
        torch.zeros(3, WIDTH, 1),
        torch.zeros(300, WIDTH),
    ],
)
async def test_malformed_features_cost_only_their_sequence(bench: Bench, rows: torch.Tensor) -> None:
    on = await stage(bench, feature_wait_ms=5000)
    await on.conductor.send(opens=[on.opening(1, PROMPT), on.opening(2, PROMPT)])
    await eventually(lambda: on.verifier.num_streams)
    on.verifier.push(1, 0, 0, rows)
    on.verifier.push(2, 0, 3)
    await assert_the_first_is_lost_and_the_second_drafted(on)


async def test_old_verifier_epoch_is_dropped(bench: Bench) -> None:
    on = await stage(bench, feature_wait_ms=5000)
    await on.conductor.send(opens=[on.opening(1, PROMPT)])
    await eventually(lambda: on.verifier.num_streams)
    on.verifier.push(1, 0, 1, epoch=2)
    on.verifier.push(1, 1, 2, torch.full((2, WIDTH), 99.0), epoch=1)
    on.verifier.push(1, 1, 2, epoch=2)
    assert list((await on.conductor.read_drafts()).drafts.starts) == [4]


async def test_opening_must_name_its_verifier(bench: Bench) -> None:
    on = await stage(bench)
    await on.conductor.send(opens=[opening(1, PROMPT)])
    answer = await on.conductor.read()
    assert [f.reason for f in answer.failures] == ["INVALID_FIELD"]


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


async def test_last_only_features_that_stop_coming_give_the_sequence_back(bench: Bench) -> None:
    on = await stage(bench, tap=LAST, feature_wait_ms=5, feature_loss_s=0.2)
    await on.conductor.send(opens=[on.opening(1, PROMPT)])
    await eventually(lambda: on.verifier.num_streams)
    on.verifier.push(1, 3, 1, tokens=[9])
    await on.conductor.read_drafts()
    await on.conductor.send(commits=commits((1, 5, [10])))
    while not (answer := await on.conductor.read()).failures:
        continue
    assert [(f.sequence_id, f.reason) for f in answer.failures] == [(1, "FEATURES_LOST")]


@pytest.mark.parametrize(("start", "rows", "tokens"), [(2, 2, [9]), (2, 1, [1, 2, 3, 4])])
async def test_malformed_last_only_features_cost_only_their_sequence(
    bench: Bench, start: int, rows: int, tokens: list[int]
) -> None:
    """More rows than the one, or more tokens than there are positions."""
    on = await stage(bench, tap=LAST, feature_wait_ms=5000)
    await on.conductor.send(opens=[on.opening(1, PROMPT), on.opening(2, PROMPT)])
    await eventually(lambda: on.verifier.num_streams)
    on.verifier.push(1, start, rows, tokens=tokens)
    on.verifier.push(2, 3, 1, tokens=[9])
    await assert_the_first_is_lost_and_the_second_drafted(on)


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
