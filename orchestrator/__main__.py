"""Entry point of the orchestrator process.

Responsible for: settings, logs, metrics, signals and the order of start and stop. The work is done by the actors
(orchestrator.supervisor). Shutdown: SIGTERM -> the director refuses new requests and its health says NOT_SERVING ->
conductors finish running requests within drain_s -> Ray stops, its files are removed -> exit 0. A second signal exits
at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog
import uvloop

from orchestrator.counters import StatusCollector
from orchestrator.ray_environment import prepare_environment
from orchestrator.settings import OrchestratorSettings
from paceline.atomic_write import write_json
from services.runtime.logs import configure_logs
from services.runtime.metrics import REGISTRY, serve_metrics
from services.runtime.settings import load

if TYPE_CHECKING:
    from orchestrator.supervisor import Supervisor

POLL_S = 0.5
STARTING_POLL_S = 0.05  # a user waits for the start

log = structlog.get_logger()


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the orchestrator until SIGTERM or SIGINT."""
    settings = load(OrchestratorSettings, sys.argv[1:] if argv is None else argv)
    configure_logs("orchestrator", level=settings.log_level, as_json=settings.log_json)
    log.info("settings", settings=settings.masked())
    code = uvloop.run(run(settings))
    if code:
        sys.exit(code)


async def run(settings: OrchestratorSettings) -> int:
    """Starts everything, waits for a signal, stops everything; returns the exit code."""
    prepare_environment(os.environ, is_embedded=settings.ray_address is None)
    from orchestrator.supervisor import Supervisor  # imports Ray

    stopping = asyncio.Event()
    supervisor = Supervisor(settings)
    metrics_port = None
    if settings.metrics_port is not None:
        try:
            _, _, metrics_port = serve_metrics(settings.host, settings.metrics_port)
        except OSError as error:
            log.error("metrics cannot listen", port=settings.metrics_port, error=str(error))
            return 1
        REGISTRY.register(StatusCollector(lambda: supervisor.status.conductors if supervisor.status else ()))
    _handle_signals(stopping)
    try:
        await asyncio.to_thread(supervisor.start_ray)
    except Exception as error:  # Ray raises errors of many classes; without Ray the process cannot work
        log.exception("Ray did not start", error=str(error))
        await asyncio.to_thread(supervisor.stop_ray)
        return 1
    _handle_signals(stopping)  # again: Ray has replaced the handlers with one that aborts
    watching = asyncio.create_task(_watch(supervisor, settings, metrics_port))
    await stopping.wait()
    log.info("draining", limit_s=settings.drain_s)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await supervisor.shutdown()
    await asyncio.to_thread(supervisor.stop_ray)
    log.info("stopped")
    return 0


async def _watch(supervisor: Supervisor, settings: OrchestratorSettings, metrics_port: int | None) -> None:
    """Keeps the director running, and logs once when the first verifier is reached."""
    was_listening = was_ready = False
    while True:
        status = await supervisor.poll()
        if status is not None and not was_listening:
            was_listening = True
            log.info(
                "listening", host=settings.host, port=status.port, metrics_port=metrics_port, pid=os.getpid()
            )
        if status is not None and status.is_ready and not was_ready:
            was_ready = True
            log.info("ready", port=status.port, conductors=[c.endpoint for c in status.conductors])
            _write_ready_file(settings, status.port, metrics_port)
        await asyncio.sleep(POLL_S if was_ready else STARTING_POLL_S)


def _write_ready_file(settings: OrchestratorSettings, port: int, metrics_port: int | None) -> None:
    path = settings.ready_file
    if path is None:
        return
    write_json(path, {"pid": os.getpid(), "port": port, "metrics_port": metrics_port}, indent=None)


def _handle_signals(stopping: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, stopping, number)


def _on_signal(stopping: asyncio.Event, number: int) -> None:
    if stopping.is_set():
        log.warning("second signal: exiting at once", signal=signal.Signals(number).name)
        os._exit(128 + number)
    stopping.set()


if __name__ == "__main__":
    main()
