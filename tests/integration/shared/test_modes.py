"""Modes that look at what was drafted, through whole deployments: drafts travel and are accepted."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.client import Finished, Started
from tests.integration.conftest import Site

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

REQUEST: dict[str, Any] = {"temperature": 0.7, "seed": 5, "max_tokens": 48}


@pytest.fixture(scope="module", params=["together", "apart"])
def site(request: pytest.FixtureRequest, together: Site, apart: Site) -> Site:
    return together if request.param == "together" else apart


@pytest.mark.parametrize("mode", ["rejection", "block", "typical"])
def test_drafts_are_accepted_in_every_mode(site: Site, prompts: list[str], mode: str) -> None:
    events = list(site.client.generate([{"role": "user", "content": prompts[0]}], mode=mode, **REQUEST))
    started, finished = events[0], events[-1]
    assert isinstance(started, Started)
    assert isinstance(finished, Finished)
    assert (started.mode, started.is_exact) == (mode, mode != "typical")
    stats = finished.stats
    assert stats.num_accepted_tokens > 0
    # Each pass adds a token of the target's own, but for a last one that ends with an accepted end token.
    missing = stats.num_accepted_tokens + stats.num_target_passes - stats.num_generated_tokens
    assert missing in (0, 1)
