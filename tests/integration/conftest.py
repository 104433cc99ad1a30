"""Whole deployments of real processes around the real default model and drafter, in fp32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from paceline.client import Completion, PacelineClient
from paceline.embedded import Deployment, DeploymentOptions, Placement
from paceline.models import resolve

NUM_STREAMS = 8


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The default model; `paceline models fetch smollm2-135m` puts it there."""
    return resolve("smollm2-135m")


@pytest.fixture(scope="session")
def drafter_dir() -> Path:
    """The drafter that ships for it."""
    from paceline.drafters import default_drafter

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
    # as well they may not beside other tests. The long hold lets slow drafts arrive.
    fixed = {"dtype": "float32", "draft_length": 4, "max_nodes": 8, "hold_us": 200_000}
    chosen = DeploymentOptions(
        model=model_dir, drafter=drafter_dir, placement=placement, **{**fixed, **options}
    )
    with Deployment(chosen) as deployment, PacelineClient(deployment.gateway_endpoint) as client:
        yield Site(deployment, client)


@pytest.fixture(scope="module")
def together(model_dir: Path, drafter_dir: Path) -> Iterator[Site]:
    """Drafter in the verifier's process; one core, so that the other deployment may run beside it."""
    yield from run_site(Placement.COLOCATED, model_dir, drafter_dir, verifier_cores=(0,))


@pytest.fixture(scope="module")
def apart(model_dir: Path, drafter_dir: Path) -> Iterator[Site]:
    """Drafter in a process of its own."""
    yield from run_site(Placement.SEPARATE, model_dir, drafter_dir)
