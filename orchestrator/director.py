"""The director: admits requests and assigns them to conductors.

Responsible for: DirectorService, the poll of the conductors (which also starts those that Ray has restarted), and
the drain of all of them. An asyncio class that the supervisor runs as a Ray actor; `start` may be called any number
of times. Deliberately does not know tokens: an admitted request talks to its conductor directly.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from orchestrator.admission import Admission
from orchestrator.settings import OrchestratorSettings
from orchestrator.status import ConductorStatus
from paceline.contract.errors import UnavailableError
from paceline.v1 import orchestrator_pb2, orchestrator_pb2_grpc, peer_pb2
from services.runtime.process import Process

POLL_S = 0.2
POLL_TIMEOUT_S = 5.0

log = structlog.get_logger()


class ConductorHandle(Protocol):
    """A conductor wherever it runs: a Ray actor in production, an object in the same process in tests."""

    def start(self) -> Awaitable[ConductorStatus]:
        """Starts the conductor unless it runs, and returns its status."""
        ...

    def shutdown(self, drain_s: float) -> Awaitable[None]:
        """Drains and stops the conductor."""
        ...


@dataclass(frozen=True, slots=True)
class DirectorStatus:
    """State of the director at one moment.

    Attributes:
        port: bound port of DirectorService.
        is_ready: at least one conductor is ready.
        conductors: their last statuses.
    """

    port: int
    is_ready: bool
    conductors: tuple[ConductorStatus, ...]


class Director:
    """Admits requests for all conductors.

    Args:
        settings: the orchestrator's.
        conductors: by the endpoint of their verifier.
    """

    def __init__(self, settings: OrchestratorSettings, conductors: Mapping[str, ConductorHandle]) -> None:
        self._settings = settings.model_copy(update={"metrics_port": None, "ready_file": None})
        self._conductors = dict(conductors)
        self._admission = Admission(settings.max_sequences)
        self._starting: asyncio.Task[None] | None = None
        self._process: Process | None = None
        self._polls: list[asyncio.Task[None]] = []
        self._is_ready = False

    async def start(self) -> DirectorStatus:
        """Starts the director unless it runs, and returns its status."""
        if self._starting is None or (self._starting.done() and self._starting.exception() is not None):
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)
        assert self._process is not None
        statuses = tuple(self._admission.statuses)
        return DirectorStatus(self._process.port, any(status.is_ready for status in statuses), statuses)

    async def shutdown(self, drain_s: float) -> None:
        """Refuses new requests at once, drains the conductors, and stops."""
        if self._process is not None:
            await self._process.shutdown(drain_s)

    async def _start(self) -> None:
        self._process = process = Process("director", self._settings)
        orchestrator_pb2_grpc.add_DirectorServiceServicer_to_server(
            DirectorServicer(self._admission), process.server
        )
        process.add_service_name(orchestrator_pb2.DESCRIPTOR.services_by_name["DirectorService"].full_name)
        process.on_drain(self._drain)
        process.on_close(self._close)
        await process.start()
        self._polls = [
            asyncio.create_task(self._poll(endpoint, conductor))
            for endpoint, conductor in self._conductors.items()
        ]

    async def _poll(self, endpoint: str, conductor: ConductorHandle) -> None:
        """Keeps one conductor's status current; a lost conductor gets no requests until it answers again."""
        assert self._process is not None
        is_lost = False
        while True:
            try:
                async with asyncio.timeout(POLL_TIMEOUT_S):
                    status = await conductor.start()
                self._admission.update(status)
                if is_lost:
                    log.info("conductor is back", verifier=endpoint, endpoint=status.endpoint)
                is_lost = False
                if status.is_ready and not self._is_ready:
                    self._is_ready = True
                    await self._process.ready()
            except Exception as error:  # Ray has many error classes for an actor that died, restarts or hangs
                self._admission.lose(endpoint)
                if not is_lost:
                    log.warning(
                        "conductor does not answer",
                        verifier=endpoint,
                        error=f"{type(error).__name__}: {error}",
                    )
                is_lost = True
            await asyncio.sleep(POLL_S)

    async def _drain(self) -> None:
        """Drains all conductors together. They get one second less, so that their last frames are still sent."""
        drain_s = max(self._settings.drain_s - 1.0, 0.0)
        results = await asyncio.gather(
            *(_shut_down(conductor, drain_s) for conductor in self._conductors.values()),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException):
                log.warning("a conductor did not drain", error=repr(result))

    async def _close(self) -> None:
        for task in self._polls:
            task.cancel()
        await asyncio.gather(*self._polls, return_exceptions=True)


async def _shut_down(conductor: ConductorHandle, drain_s: float) -> None:
    await conductor.shutdown(drain_s)


class DirectorServicer(orchestrator_pb2_grpc.DirectorServiceServicer):
    """Serves DirectorService."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    async def Admit(
        self, request: orchestrator_pb2.AdmitRequest, context: Any
    ) -> orchestrator_pb2.AdmitResponse:
        """Assigns one request to a conductor."""
        endpoint = self._admission.assign(request.num_prompt_tokens, request.max_new_tokens)
        return orchestrator_pb2.AdmitResponse(
            request_id=f"req-{uuid.uuid4().hex}", conductor_endpoint=endpoint
        )

    async def DescribeDeployment(
        self, request: orchestrator_pb2.DescribeDeploymentRequest, context: Any
    ) -> orchestrator_pb2.DescribeDeploymentResponse:
        """The served model and its drafters."""
        known = [status for status in self._admission.statuses if status.verifier]
        if not known:
            raise UnavailableError("no verifier has been reached yet")
        drafters = {
            info.instance_id: info
            for status in known
            for info in map(peer_pb2.PeerInfo.FromString, status.drafters)
        }
        return orchestrator_pb2.DescribeDeploymentResponse(
            verifier=peer_pb2.PeerInfo.FromString(known[0].verifier),
            drafters=drafters.values(),
            placement=known[0].placement,
            has_policy=all(status.has_policy for status in known),
        )
