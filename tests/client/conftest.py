"""A gateway with a scripted orchestrator behind it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gateway.server_thread import Serve, serving


@pytest.fixture
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with serving(tmp_path_factory.mktemp("tiny-model")) as start:
        yield start
