"""Whole deployments of real processes around the real default model and drafter."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from paceline.client import Completion, PacelineClient
from paceline.cpu import kernels
from paceline.embedded import Deployment, DeploymentOptions, Placement
from paceline.models import resolve

NUM_STREAMS = 8


def fast_dtype() -> str:
    """What tests run the target in that hold in any dtype.

    Where the CPU kernels run, bfloat16 is as exact as float32 and some times as fast.
    """
    return "float32" if kernels.load() is None else "bfloat16"


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The default model; `paceline models fetch smollm2-135m` puts it there."""
    return resolve("smollm2-135m")


@pytest.fixture(scope="session")
def drafter_dir() -> Path:
    """The drafter that ships for it."""
    from paceline.methods.loading import default_drafter

    return default_drafter("smollm2-135m")


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """The embedded prompts."""
    entries = json.loads(files("paceline").joinpath("assets/prompts.json").read_text())
    return [entry["text"] for entry in entries]


class Site:
    """A deployment and a client of it."""

    def __init__(self, deployment: Deployment, client: PacelineClient) -> None:
        self.deployment = deployment
        self.client = client

    def complete(self, prompt: str, **parameters: Any) -> Completion:
        """One chat turn."""
        return self.client.complete([{"role": "user", "content": prompt}], **parameters)

    def complete_all(self, prompts: list[str], **parameters: Any) -> list[Completion]:
        """Chat turns, eight at a time."""
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            return list(pool.map(lambda prompt: self.complete(prompt, **parameters), prompts))


def run_site(placement: Placement, model_dir: Path, drafter_dir: Path, **options: Any) -> Iterator[Site]:
    """A deployment for as long as the iterator is held."""
    # A fixed length, so that drafts take part in every text: the policy would turn them off where they do not pay,
    # as well they may not beside other tests. The long hold lets slow drafts arrive. So nothing hangs on a step's time.
    # Without n-gram proposals all drafts are the drafter's; the folder `shared` compares texts with them.
    fixed = {
        "dtype": fast_dtype(),
        "draft_length": 4,
        "max_nodes": 8,
        "wait_budget_us": 1_000_000,
        "ngram_tokens": 0,
    }
    untimed = {"verifier": ("--profile-s", "0")}
    chosen = DeploymentOptions(
        model=model_dir,
        drafter=drafter_dir,
        placement=placement,
        extra_flags=untimed,
        **{**fixed, **options},
    )
    with Deployment(chosen) as deployment, PacelineClient(deployment.gateway_endpoint) as client:
        yield Site(deployment, client)


def until_drafted(site: Site, prompt: str, **parameters: Any) -> Completion:
    """Repeats a request until the drafter takes part in it."""
    for _ in range(100):
        completion = site.complete(prompt, **parameters)
        if completion.stats.num_draft_tokens:
            return completion
    raise AssertionError("the drafter took no part")
