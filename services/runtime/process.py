"""One server process: start, ready, drain, stop.

Responsible for: metrics endpoint, gRPC server with health, reflection and error mapping, and the order of shutdown.
Deliberately does not know: any service. `build` (see :mod:`services.runtime.lifecycle`) adds servicers and starts what
they need.

Order of shutdown: health NOT_SERVING and `draining` set -> new calls are refused, admitted calls continue -> all drain
callbacks run together -> running calls end, both within drain_s -> the server stops and cancels the rest -> close
callbacks run in reverse order.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import structlog
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from paceline.atomic_write import write_json
from paceline.contract.errors import DrainingError, PacelineError, UnavailableError
from services.runtime.channel import server_credentials, server_options
from services.runtime.error_mapping import ErrorInterceptor
from services.runtime.metrics import serve_metrics
from services.runtime.settings import ServerSettings
from services.runtime.tls import Tls

if TYPE_CHECKING:
    from threading import Thread
    from wsgiref.simple_server import WSGIServer

Callback = Callable[[], Awaitable[None]]

_HEALTH_SERVICE = "grpc.health.v1.Health"
_STOP_GRACE_S = 2.0  # for handlers to send their last status after the drain


class Process:
    """One server process (or, in tests, one server in a process).

    Attributes:
        role: "verifier", "drafter", "scheduler", "gateway" or "orchestrator".
        settings: the effective settings.
        server: where `build` adds servicers; it starts after `build` has returned.
        log: bound logger.
        draining: set when the process admits no new work.
        port: bound gRPC port, once the server has started.
        metrics_port: bound Prometheus port, None without one.
        is_listening: whether the server has started.
    """

    def __init__(self, role: str, settings: ServerSettings) -> None:
        self.role = role
        self.settings = settings
        self.log: Any = structlog.get_logger().bind(role=role)
        self.draining = asyncio.Event()
        self.port = 0
        self.metrics_port: int | None = None
        self._calls = ErrorInterceptor(self._refuse_while_draining, lambda method: not _is_plumbing(method))
        self.server: aio.Server = aio.server(interceptors=[self._calls], options=server_options())
        self._health: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]  # absent in the stubs
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        self._service_names: list[str] = []
        self._admitted_while_draining: set[str] = set()
        self._drain_callbacks: list[Callback] = []
        self._close_callbacks: list[Callback] = []
        self._metrics: tuple[WSGIServer, Thread] | None = None
        self._is_ready = False
        self.is_listening = False

    @property
    def tls(self) -> Tls | None:
        """The process's PEM files, for its server and for channels it opens; None without TLS."""
        settings = self.settings
        if settings.tls_cert is None and settings.tls_ca is None:
            return None
        return Tls(cert=settings.tls_cert, key=settings.tls_key, ca=settings.tls_ca)

    def add_service_name(self, full_name: str) -> None:
        """Name a servicer for health and reflection, such as ``paceline.v1.TargetService``."""
        self._service_names.append(full_name)

    def admit_while_draining(self, method: str) -> None:
        """Admit new calls of ``/package.Service/Method`` during the drain, because admitted work needs them."""
        self._admitted_while_draining.add(method)

    def on_drain(self, callback: Callback) -> None:
        """Add a callback for shutdown, within drain_s: it waits for admitted work or ends endless streams."""
        self._drain_callbacks.append(callback)

    def on_close(self, callback: Callback) -> None:
        """Add a callback for after the server has stopped: it flushes, or closes channels and stores. The latest
        runs first.
        """
        self._close_callbacks.append(callback)

    async def ready(self) -> None:
        """Report SERVING to health checks, from `build` or later (when weights have loaded). Only then is the
        process routed to.
        """
        self._is_ready = True
        if self.is_listening:
            await self._announce()

    async def start(self) -> None:
        """Start metrics and gRPC; called after `build`.

        Raises:
            UnavailableError: the address is in use, or is not this machine's.
        """
        settings = self.settings
        if settings.metrics_port is not None:
            try:
                server, thread, self.metrics_port = serve_metrics(settings.host, settings.metrics_port)
            except OSError as error:
                raise UnavailableError(
                    f"metrics cannot listen on port {settings.metrics_port}: {error}"
                ) from error
            self._metrics = (server, thread)
        if settings.reflection:
            names = (*self._service_names, _HEALTH_SERVICE, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self.server)
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        address = f"[{settings.host}]" if ":" in settings.host else settings.host
        address = f"{address}:{settings.port}"
        try:
            tls = self.tls
            if tls is None:
                self.port = self.server.add_insecure_port(address)
            else:
                self.port = self.server.add_secure_port(address, server_credentials(tls))
        except RuntimeError as error:
            raise UnavailableError(f"cannot listen on {address}: {error}") from error
        await self.server.start()
        self.is_listening = True
        self.log.info(
            "listening", host=settings.host, port=self.port, metrics_port=self.metrics_port, pid=os.getpid()
        )
        if self._is_ready:
            await self._announce()

    async def shutdown(self, drain_s: float | None = None) -> None:
        """Drain and stop, in the order of the module's docstring. Safe to call twice."""
        if self.draining.is_set():
            return
        limit_s = self.settings.drain_s if drain_s is None else drain_s
        deadline = asyncio.get_running_loop().time() + limit_s
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        self.draining.set()
        self.log.info("draining", limit_s=limit_s)
        await self._run_drain_callbacks(limit_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._calls.wait_idle()
        await self.server.stop(_STOP_GRACE_S)
        await self._close()
        self.log.info("stopped")

    async def _announce(self) -> None:
        if self.draining.is_set():
            return
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        self.log.info("ready", port=self.port)
        path = self.settings.ready_file
        if path is not None:
            ports = {"pid": os.getpid(), "port": self.port, "metrics_port": self.metrics_port}
            write_json(path, ports, indent=None)

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in ("", *self._service_names):
            await self._health.set(name, status)

    async def _run_drain_callbacks(self, limit_s: float) -> None:
        tasks = [asyncio.ensure_future(callback()) for callback in self._drain_callbacks]
        if not tasks:
            return
        done, pending = await asyncio.wait(tasks, timeout=limit_s)
        for task in pending:
            task.cancel()
        if pending:
            self.log.warning("drain bound passed; cancelling what is left", num_callbacks=len(pending))
            await asyncio.wait(pending, timeout=_STOP_GRACE_S)
        for task in done:
            if not task.cancelled() and task.exception() is not None:
                self.log.error("drain callback failed", exc_info=task.exception())

    async def _close(self) -> None:
        for callback in reversed(self._close_callbacks):
            try:
                await callback()
            except Exception as error:  # the other callbacks must still run
                self.log.error("close callback failed", exc_info=error)
        if self._metrics is not None:
            server, thread = self._metrics
            await asyncio.to_thread(server.shutdown)
            server.server_close()
            await asyncio.to_thread(thread.join, 1.0)
            self._metrics = None

    def _refuse_while_draining(self, method: str) -> PacelineError | None:
        if not self.draining.is_set() or method in self._admitted_while_draining:
            return None
        return None if _is_plumbing(method) else DrainingError(f"this {self.role} is shutting down")


def _is_plumbing(method: str) -> bool:
    """Whether a method is health or reflection. They are answered until the end, and no drain waits for them:
    health watches are endless.
    """
    return method.startswith((f"/{_HEALTH_SERVICE}/", "/grpc.reflection."))
