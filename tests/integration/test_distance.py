"""`paceline bench distance` through real processes: every pair is there, and texts are the plain ones."""

from __future__ import annotations

import os

import psutil
import pytest

from experiments.bench.prompts import embedded_prompts
from experiments.distance.runner import Plan, measure
from paceline.drafters import default_drafter
from paceline.models import resolve

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


def test_a_drafter_behind_a_link_changes_no_text() -> None:
    family = {child.pid for child in psutil.Process().children(recursive=True)}
    model = "smollm2-135m"
    plan = Plan(
        model_dir=resolve(model),
        drafter_dir=default_drafter(model),
        dtype="bfloat16",
        prompts=embedded_prompts(2),
        round_trips_ms=[0.0, 40.0],
        max_tokens=24,
        rounds=2,
        cores=sorted(os.sched_getaffinity(0)),
        warm_up=1,
    )
    told: list[str] = []
    pairs = measure(plan, told.append)
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= family
    expected = [(ms, prompt.prompt_id) for ms in (0.0, 40.0) for _ in range(2) for prompt in plan.prompts]
    assert [(pair.round_trip_ms, pair.prompt_id) for pair in pairs] == expected
    assert all(pair.plain.token_ids == pair.speculative.token_ids for pair in pairs)
    assert all(pair.plain.num_passes >= 23 for pair in pairs)
    assert all(1 <= pair.speculative.num_passes <= pair.plain.num_passes for pair in pairs)
    assert "40 ms: warming up" in told
