"""The health check that containers run, against a real gRPC server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

pytestmark = pytest.mark.chart


@pytest.fixture
def server() -> Iterator[tuple[int, health.HealthServicer]]:
    servicer = health.HealthServicer()
    running = grpc.server(futures.ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, running)
    port = running.add_insecure_port("127.0.0.1:0")
    running.start()
    yield port, servicer
    running.stop(None).wait()


def check(root: Path, *arguments: object) -> int:
    script = root / "deploy" / "images" / "health.py"
    done = subprocess.run(
        [sys.executable, str(script), *map(str, arguments)], timeout=30, capture_output=True
    )
    assert b"Traceback" not in done.stderr, done.stderr
    return done.returncode


def test_it_says_whether_the_server_serves(root: Path, server: tuple[int, health.HealthServicer]) -> None:
    port, servicer = server
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    assert check(root, port) == 0
    assert check(root, port, "unknown.Service") == 1
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert check(root, port) == 1


def test_it_says_no_where_nobody_listens(root: Path, server: tuple[int, health.HealthServicer]) -> None:
    assert check(root, 1) == 1
