"""The conductor: the actor around the speculation cycles of one verifier.

Responsible for: putting its parts together, its gRPC server on a free port, the tasks of the links, the clock that
ticks, status and drain. An asyncio class: the supervisor runs it as a Ray actor, and tests run it directly. Ray
restarts it by calling `__init__` again, so `start` may be called any number of times and starts what is not running.
Deliberately does not know the director. Tokens travel on the gRPC streams that it owns, never through Ray.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine
from typing import Any

import structlog

from orchestrator.counters import Counters
from orchestrator.cycles import Cycles
from orchestrator.draft_dispatcher import DraftDispatcher
from orchestrator.drafter_link import DrafterLink
from orchestrator.peers_in_use import PeersInUse
from orchestrator.policy import PolicyInForce
from orchestrator.policy_watch import PolicyWatch
from orchestrator.report_stream import send_reports
from orchestrator.reports import Reports
from orchestrator.sequence_lifecycle import SequenceLifecycle
from orchestrator.sequences import ConductorSequences
from orchestrator.servicer import ConductorServicer
from orchestrator.settings import OrchestratorSettings
from orchestrator.status import ConductorStatus
from orchestrator.step_handler import StepHandler
from orchestrator.verifier_link import VerifierLink
from paceline.contract.errors import DrainingError
from paceline.v1 import orchestrator_pb2, orchestrator_pb2_grpc, peer_pb2
from services.runtime.process import Process

TICK_S = 0.05
RUN_METHOD = "/paceline.v1.ConductorService/Run"

log = structlog.get_logger()


class Conductor:
    """One verifier's conductor."""

    def __init__(self, settings: OrchestratorSettings, verifier_endpoint: str, advertised_host: str) -> None:
        self._settings = settings.model_copy(update={"port": 0, "metrics_port": None, "ready_file": None})
        self._verifier_endpoint = verifier_endpoint
        self._advertised_host = advertised_host
        self._starting: asyncio.Task[None] | None = None
        self._process: Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._policy_watch: PolicyWatch | None = None

    async def start(self) -> ConductorStatus:
        """Starts the conductor unless it runs, and returns its status."""
        if self._starting is None or (self._starting.done() and self._starting.exception() is not None):
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)
        return self._status()

    async def shutdown(self, drain_s: float) -> None:
        """Finishes running requests within `drain_s`, ends the rest, and stops."""
        if self._process is not None:
            await self._process.shutdown(drain_s)

    async def _start(self) -> None:
        self._process = process = Process("conductor", self._settings)
        self._build(process)
        orchestrator_pb2_grpc.add_ConductorServiceServicer_to_server(self._servicer, process.server)
        process.add_service_name(orchestrator_pb2.DESCRIPTOR.services_by_name["ConductorService"].full_name)
        process.admit_while_draining(RUN_METHOD)
        process.on_drain(self._drain)
        process.on_close(self._close)
        await process.start()
        await process.ready()
        self._spawn_tasks(process)

    def _build(self, process: Process) -> None:
        """Makes the parts; nothing runs yet."""
        settings = self._settings
        clock = asyncio.get_running_loop().time
        self._counters = Counters()
        self._policy = PolicyInForce(settings.policy_overrides)
        self._sequences = sequences = ConductorSequences()
        client_id = f"conductor-{uuid.uuid4().hex[:12]}"
        self._verifier = VerifierLink(
            self._verifier_endpoint,
            client_id=client_id,
            timing=settings.timing(settings.verifier_silence_s),
            tls=process.tls,
            clock=clock,
            num_running=lambda: len(sequences),
            feature_endpoint=settings.feature_endpoint(self._verifier_endpoint),
        )
        self._peers = PeersInUse(
            settings.placement, settings.drafters, lambda: self._verifier.info, self._reached_drafters
        )
        self._reports = Reports(self._peers.measurement_key, self._peers.longest_draft, self._advertised_host)
        self._dispatcher = DraftDispatcher(
            sequences=sequences,
            verifier=self._verifier,
            policy=self._policy,
            reports=self._reports,
            counters=self._counters,
            clock=clock,
            drafters_per_sequence=settings.drafters_per_sequence,
        )
        if settings.placement in ("auto", "separate"):
            self._dispatcher.links = tuple(
                DrafterLink(
                    endpoint,
                    self._dispatcher,
                    client_id=client_id,
                    timing=settings.timing(settings.drafter_silence_s),
                    tls=process.tls,
                    clock=clock,
                )
                for endpoint in settings.drafters
            )
        self._lifecycle = SequenceLifecycle(
            sequences=sequences,
            verifier=self._verifier,
            dispatcher=self._dispatcher,
            reports=self._reports,
            counters=self._counters,
            patience=settings.patience,
            placement=self._peers.placement,
            clock=clock,
        )
        steps = StepHandler(
            sequences=sequences,
            lifecycle=self._lifecycle,
            verifier=self._verifier,
            dispatcher=self._dispatcher,
            policy=self._policy,
            reports=self._reports,
            counters=self._counters,
            clock=clock,
        )
        self._cycles = Cycles(
            sequences=sequences,
            lifecycle=self._lifecycle,
            steps=steps,
            verifier=self._verifier,
            dispatcher=self._dispatcher,
            policy=self._policy,
            reports=self._reports,
            placement=self._peers.placement,
            clock=clock,
        )
        self._servicer = ConductorServicer(
            self._lifecycle, settings.max_sequences, lambda: self._verifier.info, self._dispatcher.may_have
        )

    def _spawn_tasks(self, process: Process) -> None:
        """Starts the links, the clock, and the streams to the scheduler."""
        self._spawn(self._verifier.run(self._cycles))
        for link in self._dispatcher.links:
            self._spawn(self._run_drafter(link))
        self._spawn(self._tick())
        scheduler = self._settings.scheduler
        if scheduler is not None:
            self._spawn(send_reports(self._reports, scheduler, process.tls))
            self._policy_watch = PolicyWatch(
                scheduler, process.tls, self._peers.measurement_key, self._cycles.accept_policy
            )
            self._spawn(self._policy_watch.run())

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        task.add_done_callback(_log_failure)
        self._tasks.append(task)

    async def _run_drafter(self, link: DrafterLink) -> None:
        """Runs a drafter's link once the target is known, because a drafter is checked against the target."""
        await self._verifier.is_known.wait()
        await link.run()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._cycles.tick()

    async def _drain(self) -> None:
        try:
            while len(self._sequences):
                await asyncio.sleep(TICK_S)
        finally:
            self._lifecycle.end_all(DrainingError("this conductor is shutting down"))

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _reached_drafters(self) -> list[peer_pb2.PeerInfo]:
        return [link.info for link in self._dispatcher.links if link.info is not None]

    def _has_policy(self) -> bool:
        """Whether the scheduler, if there is one, has sent a policy for the peers in use."""
        watch = self._policy_watch
        if watch is None:
            return self._settings.scheduler is None
        return watch.accepted_key is not None and watch.accepted_key == self._peers.measurement_key()

    def _status(self) -> ConductorStatus:
        assert self._process is not None
        verifier = self._verifier
        is_ready = verifier.is_up and not self._process.draining.is_set()
        return ConductorStatus(
            endpoint=f"{self._advertised_host}:{self._process.port}",
            verifier_endpoint=verifier.endpoint,
            is_ready=is_ready,
            is_draining=self._process.draining.is_set(),
            num_running=len(self._sequences),
            placement=self._peers.placement(),
            verifier=b"" if verifier.info is None else verifier.info.SerializeToString(),
            drafters=tuple(
                link.info.SerializeToString()
                for link in self._dispatcher.links
                if link.is_up and link.info is not None
            ),
            has_policy=self._has_policy(),
            reason="" if is_ready else verifier.last_reason,
            counters=self._counters.as_dict()
            | {
                "num_dropped_draft_tokens": verifier.num_dropped_draft_tokens,
                "num_dropped_samples": self._reports.num_dropped,
            },
        )


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.critical("a conductor task ended", exc_info=task.exception())
