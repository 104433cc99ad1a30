"""`paceline bench distance` through real processes: what crosses the distance, and that no text changes."""

from __future__ import annotations

import os

import psutil
import pytest

from experiments.bench.prompts import embedded_prompts
from experiments.distance.runner import LINKS, Plan, pairs_of, serving
from paceline.methods.loading import default_drafter
from paceline.models import resolve

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


def test_a_drafter_behind_links_drafts_and_changes_no_text() -> None:
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
        fixed={"ngram_tokens": 0, "draft_length": 4, "wait_budget_us": 500_000},
    )
    told: list[str] = []
    with serving(plan) as (client, links):
        pairs = pairs_of(plan, client, links, told.append)
        crossed = links.counters()
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= family
    expected = [(ms, prompt.prompt_id) for ms in (0.0, 40.0) for _ in range(2) for prompt in plan.prompts]
    assert [(pair.round_trip_ms, pair.prompt_id) for pair in pairs] == expected
    assert "40 ms: warming up" in told
    assert all(pair.plain.token_ids == pair.speculative.token_ids for pair in pairs)
    assert all(pair.plain.num_passes >= 23 for pair in pairs)
    assert all(sum(pair.speculative.drafted_per_position) > 0 for pair in pairs)
    assert min(pair.speculative.num_passes for pair in pairs) < 20
    # Drafts come one way; features of every position, 3 kB each, the other.
    assert set(crossed) == set(LINKS)
    num_tokens = sum(len(pair.speculative.token_ids) for pair in pairs)
    assert crossed["features"].back_bytes > 1000 * num_tokens
    assert crossed["drafter"].back_bytes > 20 * num_tokens / 4
    # Each held step waits for its draft, which is as far away as was asked for.
    far = [pair for pair in pairs if pair.round_trip_ms == 40.0]
    assert all(pair.speculative.elapsed_s > 0.04 * (pair.speculative.num_passes - 2) for pair in far)
