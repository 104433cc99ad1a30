"""The two deployments of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.embedded import Placement
from tests.integration.conftest import Site, run_site


@pytest.fixture(scope="package")
def together(model_dir: Path, drafter_dir: Path) -> Iterator[Site]:
    """Drafter in the verifier's process; whoever ends a process of it starts it again."""
    yield from run_site(Placement.COLOCATED, model_dir, drafter_dir, verifier_threads=1, ngram_tokens=8)


@pytest.fixture(scope="package")
def apart(model_dir: Path, drafter_dir: Path) -> Iterator[Site]:
    """Drafter in a process of its own; whoever ends a process of it starts it again."""
    yield from run_site(Placement.SEPARATE, model_dir, drafter_dir, ngram_tokens=8)
