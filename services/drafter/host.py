"""The parts of a drafter process put together: drafter, draft loop, feature subscriptions and servicer."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

import structlog
import torch

from paceline.methods.drafter import Drafter
from paceline.methods.loading import drafter_tap, load_drafter
from paceline.models import resolve
from paceline.target import Device, configure_threads
from paceline.v1 import drafter_pb2, drafter_pb2_grpc, peer_pb2
from services.drafter.feature_routes import FeatureRoutes
from services.drafter.inbox import DrafterInbox
from services.drafter.info import peer_info
from services.drafter.loop import DraftLoop
from services.drafter.requests import FrameReader
from services.drafter.rounds import RoundLimits
from services.drafter.servicer import DrafterServicer
from services.drafter.settings import DrafterSettings
from services.runtime import metrics
from services.runtime.process import Process

LOOP_CHECK_S = 0.5

log = structlog.get_logger()


class DrafterHost:
    """Everything that serves one drafter."""

    def __init__(self, settings: DrafterSettings, drafter: Drafter, info: peer_pb2.PeerInfo) -> None:
        self.info = info
        self.settings = settings
        self._drafter = drafter
        self._inbox = DrafterInbox()

    @classmethod
    def load(cls, settings: DrafterSettings, num_threads: int) -> DrafterHost:
        """Loads the drafter; takes seconds."""
        configure_threads(num_threads)
        model_dir = resolve(settings.model)
        dtype = (
            Device.parse(settings.device).default_dtype()
            if settings.dtype == "auto"
            else getattr(torch, settings.dtype)
        )
        drafter = load_drafter(settings.drafter, model_dir, device=settings.device, dtype=dtype)
        info = peer_info(
            drafter,
            model_dir,
            device=settings.device,
            dtype=dtype,
            tap=drafter_tap(settings.drafter),
            max_positions=drafter.max_positions,
            name=settings.name,
        )
        return cls(settings, drafter, info)

    async def attach(self, process: Process, on_start: Callable[[], None] = lambda: None) -> None:
        """Serves on a process's server until the process ends; ``on_start`` is called on the draft loop's thread."""
        settings, info = self.settings, self.info
        routes = FeatureRoutes(info, self._inbox, process.tls)
        loop = DraftLoop(
            self._drafter,
            self._inbox,
            RoundLimits(
                max_sequences=settings.max_sequences,
                max_positions=info.max_positions,
                feature_wait_s=settings.feature_wait_ms / 1e3,
                feature_gather_s=settings.feature_gather_ms / 1e3,
                feature_loss_s=settings.feature_loss_s,
            ),
            info.model_name,
            routes.drop,
        )
        servicer = DrafterServicer(info, self._inbox, FrameReader(info, time.monotonic), routes)
        drafter_pb2_grpc.add_DrafterServiceServicer_to_server(servicer, process.server)
        process.add_service_name(drafter_pb2.DESCRIPTOR.services_by_name["DrafterService"].full_name)
        metrics.DRAFTER_SEQUENCES.labels(info.model_name, info.method).set_function(
            lambda: loop.num_sequences
        )
        loop.start(on_start)
        watch = asyncio.create_task(_watch(loop))

        async def drain() -> None:
            """Ends the streams at once: conductors lose no text without this drafter."""
            servicer.end_streams()

        async def close() -> None:
            watch.cancel()
            await routes.close()
            await asyncio.to_thread(loop.stop)

        process.on_drain(drain)
        process.on_close(close)
        await process.ready()
        log.info("drafter loaded", method=info.method, device=info.device.name, dtype=info.dtype)


async def _watch(loop: DraftLoop) -> None:
    """Ends the process when the loop has ended: without its loop a drafter is of no use, and its peers must notice."""
    while loop.is_alive:
        await asyncio.sleep(LOOP_CHECK_S)
    log.critical("the draft loop ended; exiting", error=repr(loop.failure))
    os._exit(1)
