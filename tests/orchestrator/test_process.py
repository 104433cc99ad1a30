"""The orchestrator as a real process with a real Ray, against scripted peers: faults of its own actors, and the drain.

One process serves all tests of this file, in order; the last one ends it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import psutil
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.v1 import orchestrator_pb2, orchestrator_pb2_grpc
from services.runtime.channel import open_channel
from tests.orchestrator.conftest import eventually, run_request
from tests.orchestrator.scripted_drafter import ScriptedDrafter
from tests.orchestrator.scripted_peers import continuation
from tests.orchestrator.scripted_verifier import ScriptedVerifier

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

ROOT = Path(__file__).parents[2]
PROMPT = [5, 6, 7]


class Orchestrator:
    """The process, its peers, and a client."""

    def __init__(self, process: subprocess.Popen[bytes], ready_file: Path, log_file: Path) -> None:
        self.process = process
        self.ready_file = ready_file
        self.log_file = log_file
        self.verifier = ScriptedVerifier()
        self.drafter = ScriptedDrafter()

    @property
    def ports(self) -> dict[str, int]:
        ports: dict[str, int] = json.loads(self.ready_file.read_text())
        return ports

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.ports['port']}"

    def worker(self, name: str) -> psutil.Process | None:
        """The live Ray worker of an actor class, if there is one."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if child.cmdline() and f"ray::{name}" in child.cmdline()[0]:
                    return child
            except psutil.Error:  # it ended meanwhile
                continue
        return None

    async def admit(self) -> orchestrator_pb2.AdmitResponse:
        """Asks for a place until there is one."""
        async with asyncio.timeout(40):
            while True:
                channel = open_channel(self.endpoint)
                try:
                    stub = orchestrator_pb2_grpc.DirectorServiceStub(channel)
                    return await stub.Admit(
                        orchestrator_pb2.AdmitRequest(num_prompt_tokens=3, max_new_tokens=40), timeout=2
                    )
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.1)
                finally:
                    await channel.close()

    async def run(self, num_tokens: int = 40, on_token: Callable[[int], None] = lambda _: None) -> list[int]:
        """A request as a gateway runs it: another conductor continues where one was lost."""
        tokens: list[int] = []
        async with asyncio.timeout(60):
            while True:
                place = await self.admit()
                channel = open_channel(place.conductor_endpoint)
                request = run_request(
                    [*PROMPT, *tokens],
                    num_tokens,
                    request_id=place.request_id,
                    num_resumed_tokens=len(tokens),
                )
                try:
                    async for frame in orchestrator_pb2_grpc.ConductorServiceStub(channel).Run(
                        request, timeout=30
                    ):
                        tokens.extend(frame.token_ids)
                        on_token(len(tokens))
                        if frame.finish_reason:
                            return tokens
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise
                finally:
                    await channel.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def orchestrator(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Orchestrator]:
    """Starts peers and process; ends by its pid whatever is left."""
    folder = tmp_path_factory.mktemp("orchestrator")
    (folder / "tmp").mkdir()
    verifier, drafter = ScriptedVerifier(), ScriptedDrafter()
    await verifier.start()
    await drafter.start()
    command = [sys.executable, "-m", "orchestrator", "--port", "0", "--metrics-port", "0", "--drain-s", "5"]
    command += ["--verifiers", verifier.endpoint, "--drafters", drafter.endpoint]
    command += ["--ready-file", str(folder / "ready.json")]
    short_tmp = Path(os.environ.get("TMPDIR", "/tmp"))  # Ray's socket paths must be short
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(short_tmp)}
    with (folder / "log").open("wb") as log:
        process = await asyncio.to_thread(
            subprocess.Popen, command, cwd=ROOT, env=environment, stdout=log, stderr=log
        )
    started = Orchestrator(process, folder / "ready.json", folder / "log")
    started.verifier, started.drafter = verifier, drafter
    try:
        async with asyncio.timeout(60):
            while not started.ready_file.exists():
                assert process.poll() is None, started.log_file.read_text()
                await asyncio.sleep(0.05)
        yield started
    finally:
        if process.poll() is None:
            children = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            for child in children:
                if child.is_running():
                    child.kill()
            process.wait(10)
        await verifier.stop()
        await drafter.stop()


async def test_admits_runs_and_describes(orchestrator: Orchestrator) -> None:
    assert await orchestrator.run() == continuation(PROMPT, 40)
    channel = open_channel(orchestrator.endpoint)
    stub = orchestrator_pb2_grpc.DirectorServiceStub(channel)
    description = await stub.DescribeDeployment(orchestrator_pb2.DescribeDeploymentRequest(), timeout=5)
    assert description.placement == "separate"
    assert description.verifier == orchestrator.verifier.info
    assert [info.instance_id for info in description.drafters] == [orchestrator.drafter.info.instance_id]
    health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.Admit(
            orchestrator_pb2.AdmitRequest(num_prompt_tokens=4000, max_new_tokens=4000), timeout=5
        )
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await channel.close()


async def test_metrics_are_exported(orchestrator: Orchestrator) -> None:
    def page() -> str:
        url = f"http://127.0.0.1:{orchestrator.ports['metrics_port']}/metrics"
        with urllib.request.urlopen(url, timeout=5) as response:
            text: str = response.read().decode()
        return text

    async with asyncio.timeout(10):
        while "paceline:conductor_requests_total{" not in (text := await asyncio.to_thread(page)):
            await asyncio.sleep(0.1)
    assert f'paceline:conductor_ready{{verifier="{orchestrator.verifier.endpoint}"}} 1.0' in text


async def test_request_survives_a_killed_conductor(orchestrator: Orchestrator) -> None:
    victim = orchestrator.worker("ConductorActor")
    assert victim is not None

    def kill(num_tokens: int) -> None:
        if num_tokens > 20 and victim.is_running():
            victim.kill()

    assert await orchestrator.run(1500, kill) == continuation(PROMPT, 1500)
    assert not victim.is_running()
    successor = orchestrator.worker("ConductorActor")
    assert successor is not None
    assert successor.pid != victim.pid
    await eventually(lambda: not orchestrator.verifier.running)  # nothing of the lost conductor is left


async def test_killed_director_comes_back_on_its_port(orchestrator: Orchestrator) -> None:
    victim = orchestrator.worker("DirectorActor")
    assert victim is not None
    victim.kill()
    await eventually(lambda: not victim.is_running())
    assert await orchestrator.run() == continuation(PROMPT, 40)


async def test_sigterm_finishes_what_runs_and_leaves_nothing(orchestrator: Orchestrator) -> None:
    children = psutil.Process(orchestrator.process.pid).children(recursive=True)
    running = asyncio.create_task(orchestrator.run(1000))
    await eventually(lambda: orchestrator.verifier.running)
    orchestrator.process.send_signal(signal.SIGTERM)
    assert await running == continuation(PROMPT, 1000)
    assert await asyncio.to_thread(orchestrator.process.wait, 40) == 0
    await eventually(lambda: not any(child.is_running() for child in children), timeout_s=20)
    log = orchestrator.log_file.read_text()
    assert '"event": "stopped"' in log
    assert '"event": "draining"' in log
