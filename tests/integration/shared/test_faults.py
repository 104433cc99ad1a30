"""Losing what text does not depend on: Redis, the scheduler, a hung drafter; and surviving a verifier restart."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.integration.conftest import Site, until_drafted

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

REQUEST = {"temperature": 0.0, "max_tokens": 32}


def test_text_goes_on_without_redis_and_scheduler(apart: Site, prompts: list[str]) -> None:
    expected = apart.complete(prompts[0], **REQUEST).token_ids
    apart.deployment.kill("redis")
    assert apart.complete(prompts[0], **REQUEST).token_ids == expected
    apart.deployment.kill("scheduler")
    assert apart.complete(prompts[0], **REQUEST).token_ids == expected
    apart.deployment.restart("redis")
    apart.deployment.restart("scheduler")
    assert apart.complete(prompts[0], **REQUEST).token_ids == expected


def test_a_hung_drafter_costs_time_only(apart: Site, prompts: list[str]) -> None:
    expected = apart.complete(prompts[1], speculation=False, **REQUEST).token_ids
    os.kill(apart.deployment.processes["drafter"], signal.SIGSTOP)
    try:
        assert apart.complete(prompts[1], **REQUEST).token_ids == expected
    finally:
        os.kill(apart.deployment.processes["drafter"], signal.SIGCONT)
    assert until_drafted(apart, prompts[1], **REQUEST).token_ids == expected


def test_a_request_survives_a_verifier_restart(apart: Site, prompts: list[str]) -> None:
    expected = apart.complete(prompts[2], speculation=False, **REQUEST).token_ids
    stream = apart.client.generate([{"role": "user", "content": prompts[2]}], **REQUEST)
    events = [next(stream), next(stream)]
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(lambda: list(stream))
        apart.deployment.kill("verifier")
        apart.deployment.restart("verifier")
        events += rest.result(timeout=120)
    seen = tuple(token for event in events for token in getattr(event, "token_ids", ()))
    assert seen == expected
    assert until_drafted(apart, prompts[2], **REQUEST).token_ids == expected
