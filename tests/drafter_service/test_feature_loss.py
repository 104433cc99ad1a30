"""Features that stop or are malformed, and verifiers that are the wrong ones: what each costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.v1 import peer_pb2
from tests.drafter_service.conftest import Bench, commits, eventually, opening
from tests.drafter_service.feature_stage import (
    LAST,
    PROMPT,
    assert_the_first_is_lost_and_the_second_drafted,
    stage,
)
from tests.drafter_service.scripted import WIDTH


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
