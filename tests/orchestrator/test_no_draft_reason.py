"""A generation without a verified draft token says why: off, missing or late."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.v1 import generation_pb2, sampling_pb2
from tests.orchestrator.conftest import Bench, run_request
from tests.orchestrator.scripted_drafter import ScriptedDrafter
from tests.orchestrator.scripted_verifier import ScriptedVerifier

NAME = generation_pb2.NoDraftReason.Name


async def reason_of(bench: Bench, num_tokens: int = 20, **fields: Any) -> str:
    stats = (await bench.run(run_request([5, 6, 7], num_tokens, **fields))).stats
    return NAME(stats.no_draft_reason).removeprefix("NO_DRAFT_REASON_")


@pytest.mark.parametrize("is_stale", [True, False])
async def test_drafts_that_come_too_late(bench: Bench, is_stale: bool) -> None:
    drafter = ScriptedDrafter()
    drafter.is_stale, drafter.is_silent = is_stale, not is_stale
    await bench.start(ScriptedVerifier(), drafter)
    assert await reason_of(bench) == "LATE"


async def test_verified_drafts_need_no_reason(bench: Bench) -> None:
    verifier = ScriptedVerifier()
    verifier.waits_for_drafts = True
    await bench.start(verifier, ScriptedDrafter())
    assert await reason_of(bench, 60) == "UNSPECIFIED"


async def test_a_request_that_wants_no_drafts(bench: Bench) -> None:
    await bench.start(ScriptedVerifier(), ScriptedDrafter())
    off = sampling_pb2.SpeculationOptions(disabled=True)
    assert await reason_of(bench, speculation=off) == "REQUEST"
    assert await reason_of(bench, 1, speculation=off) == "UNSPECIFIED"  # no step could have had any


async def test_a_policy_without_drafts(bench: Bench) -> None:
    await bench.start(ScriptedVerifier(), ScriptedDrafter(), draft_length=0)
    assert await reason_of(bench) == "POLICY"


async def test_no_drafter_was_named(bench: Bench) -> None:
    await bench.start(ScriptedVerifier(), draft_length=0)
    assert await reason_of(bench) == "MISSING"


async def test_the_drafter_does_not_run(bench: Bench) -> None:
    drafter = ScriptedDrafter()
    await bench.start(ScriptedVerifier(), drafter)
    await drafter.stop()
    await bench.until(lambda status: not status.drafters)
    assert await reason_of(bench) == "MISSING"


async def test_a_colocated_drafter_is_there(bench: Bench) -> None:
    await bench.start(ScriptedVerifier(method="eagle3"))
    assert bench.status.placement == "colocated"
    assert await reason_of(bench) == "LATE"
