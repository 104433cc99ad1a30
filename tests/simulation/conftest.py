"""The tiny target and drafters of the drafters' tests, loaded once, and slots that must grow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.methods.conftest import (  # noqa: F401  fixtures
    eagle3_dir,
    eagle3_tensors,
    independent_dir,
    medusa1_dir,
    target_dir,
)
from tests.simulation.kit import Kit


@pytest.fixture(scope="module")
def kit(target_dir: Path, eagle3_dir: Path, independent_dir: Path) -> Iterator[Kit]:  # noqa: F811
    """Engines, drafters and texts for any number of worlds."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("services.verifier.kv_allocator.GROWTH_TOKENS", 8)
        yield Kit.load(target_dir, {"eagle3": eagle3_dir, "independent": independent_dir})


@pytest.fixture(scope="module")
def medusa_kit(target_dir: Path, medusa1_dir: Path) -> Iterator[Kit]:  # noqa: F811
    """The same with heads that read the newest position alone."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("services.verifier.kv_allocator.GROWTH_TOKENS", 8)
        yield Kit.load(target_dir, {"medusa1": medusa1_dir})
