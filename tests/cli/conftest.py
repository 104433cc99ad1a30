"""A gateway with a scripted orchestrator behind it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

from tests.gateway.server_thread import Serve, serving


@pytest.fixture
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with serving(tmp_path_factory.mktemp("tiny-model")) as start:
        yield start


@pytest.fixture(autouse=True)
def _quiet_servers() -> Iterator[None]:
    """The gateway of these tests runs in the test's process; its log must not mix with the command's output."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory(), processors=[])
    yield
    structlog.reset_defaults()
