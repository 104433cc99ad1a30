"""The parts of one verifier process: engine, step loop and servicer.

Responsible for: building the parts, serving them on a process, and ending the process when the step loop ends.

Called by: the entry point.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import structlog
import torch

from paceline.methods.loading import drafter_tap, load_drafter
from paceline.models import resolve
from paceline.target import Device, TargetEngine
from paceline.v1 import target_pb2, target_pb2_grpc
from services.runtime.process import Process
from services.verifier.budget import NodeBudget
from services.verifier.colocated import ColocatedDrafter
from services.verifier.feature_hub import FeatureHub
from services.verifier.grammar_compiler import RequestGrammars
from services.verifier.inbox import VerifierInbox
from services.verifier.info import peer_info
from services.verifier.loop import StepLoop
from services.verifier.observer import StepObserver
from services.verifier.profile import TimedStep, profile_steps
from services.verifier.report import StepEvent
from services.verifier.servicer import TargetServicer
from services.verifier.settings import VerifierSettings
from services.verifier.step import StepRunner
from services.verifier.table import SequenceLimits

log = structlog.get_logger()

LOOP_CHECK_S = 0.5


class VerifierHost:
    """Everything that serves one target."""

    def __init__(
        self,
        settings: VerifierSettings,
        model_dir: Path,
        engine: TargetEngine,
        drafter: ColocatedDrafter | None,
        profile: list[TimedStep],
    ):
        self.engine = engine
        self._profile = profile
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._failure: Exception | None = None  # why a step event could not be published
        parts = engine.taps[0].parts(engine.shape.hidden_size) if engine.taps else ()
        self._features = FeatureHub(engine.project, parts)
        self._inbox = VerifierInbox()
        self.info = peer_info(engine, model_dir, model_dir.name, settings.device, drafter)
        self._constraints = RequestGrammars(model_dir, self.info.vocab_size, tuple(self.info.eos_token_ids))
        budget = NodeBudget()
        for step in profile:
            budget.observe_step(step.num_rows, step.step_us * 1e-6)
        self._runner = StepRunner(
            engine,
            self._inbox,
            self._features,
            drafter,
            budget,
            SequenceLimits(
                settings.max_sequences,
                settings.max_waiting,
                settings.prefix_cache_bytes,
                settings.ngram_tokens,
            ),
            self._on_step,
        )
        self._loop = StepLoop(self._runner, self._inbox)
        self._observer = StepObserver(self.info.model_name, self._runner.calibrators)

    @classmethod
    def load(cls, settings: VerifierSettings, num_threads: int) -> VerifierHost:
        """Load the model and, where asked for, a drafter beside it; takes seconds to minutes."""
        model_dir = resolve(settings.model)
        dtype = (
            Device.parse(settings.device).default_dtype()
            if settings.dtype == "auto"
            else getattr(torch, settings.dtype)
        )
        tap = None
        if settings.drafter is None and settings.tap_from is not None:
            tap = drafter_tap(settings.tap_from)  # a drafter in this process brings its own tap
        engine = TargetEngine.load(
            model_dir,
            settings.device,
            dtype,
            taps=[] if tap is None else [tap],
            num_threads=num_threads,
            executor=settings.executor,
            kv_limit_bytes=None if settings.kv_limit_mib is None else settings.kv_limit_mib << 20,
            row_buckets=settings.row_buckets,
        )
        drafter = None
        if settings.drafter is not None:
            loaded = load_drafter(settings.drafter, model_dir, device=settings.device, dtype=engine.dtype)
            drafter = ColocatedDrafter(loaded, engine)
            if loaded.tap is not None:
                engine.add_tap(loaded.tap)
        most = settings.max_sequences * engine.shape.max_positions * engine.cache.layout.bytes_per_token
        committed_bytes = engine.cache.commit(min(settings.kv_pool_bytes, most))
        log.info("memory committed", kv_cache_mib=committed_bytes >> 20)
        profile = profile_steps(engine, settings.profile_s)
        return cls(settings, model_dir, engine, drafter, profile)

    async def attach(self, process: Process, on_start: Callable[[], None] = lambda: None) -> None:
        """Serve on a process's server until the process ends; the step loop's thread calls ``on_start`` first."""
        servicer = TargetServicer(
            self.info, self._inbox, self._features, self._constraints, process.draining, self._profile
        )
        target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, process.server)
        process.add_service_name(target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name)
        self._event_loop = asyncio.get_running_loop()
        self._loop.start(on_start)
        watch = asyncio.create_task(self._watch())

        async def drain() -> None:
            """Let running sequences end, then the streams; the drain's own time limit may interrupt this."""
            while self._runner.table.num_unfinished and self._loop.is_alive:
                await asyncio.sleep(0.02)
            servicer.end_streams()

        async def close() -> None:
            watch.cancel()
            await asyncio.to_thread(self._loop.stop)
            await asyncio.to_thread(self._constraints.close)

        process.on_drain(drain)
        process.on_close(close)
        await process.ready()
        log.info(
            "target loaded", model=self.info.model_name, device=self.info.device.name, dtype=self.info.dtype
        )

    def _on_step(self, event: StepEvent) -> None:
        """Let the event loop's thread pack the frames while the next pass runs; between two passes the target idles."""
        assert self._event_loop is not None, "the loop is started on it"
        self._event_loop.call_soon_threadsafe(self._publish, event)

    def _publish(self, event: StepEvent) -> None:
        try:
            for session, frame in event.frames():
                session.put(frame)
            self._observer.observe(event)
        except Exception as error:  # a stream without one of its steps is broken
            self._failure = error
            log.exception("a step event could not be published")

    async def _watch(self) -> None:
        """End the process when its loop has ended, so that peers notice at once."""
        while self._loop.is_alive and self._failure is None:
            await asyncio.sleep(LOOP_CHECK_S)
        log.critical("the step loop ended; exiting", error=repr(self._loop.failure or self._failure))
        os._exit(1)
