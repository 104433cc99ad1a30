"""The life of a server process: logs, signals and the exit code.

Responsible for: starting a :class:`services.runtime.process.Process` and ending it on SIGTERM or SIGINT, with
exit code 0 after a clean stop. A second signal exits at once. Deliberately does not know: any service, the
order of shutdown.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import NoReturn

import uvloop

from paceline.contract.errors import PacelineError
from services.runtime.logs import configure_logs
from services.runtime.process import Process
from services.runtime.settings import ServerSettings
from services.runtime.tasks import end_task

Build = Callable[[Process], Awaitable[None]]

# How long one thread may keep the interpreter lock from another. A compute thread releases it for
# milliseconds in every step, and then waits for the event loop to return it: a separate round took 21.5 ms
# with the default of 5 ms, and 20.2 with this.
_SWITCH_INTERVAL_S = 0.0005


def serve(role: str, settings: ServerSettings, build: Build) -> NoReturn:
    """Run a process until SIGTERM or SIGINT, then exit with code 0 after a clean stop. Never returns.

    A start that fails (a PacelineError such as a port in use, or any other exception) is logged and exits with
    1.
    """
    configure_logs(role, level=settings.log_level, as_json=settings.log_json)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    code = uvloop.run(_run(role, settings, build))
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is closed. Unloading torch and gRPC would take seconds more, and a supervisor waits for the
    # exit.
    os._exit(code)


async def _run(role: str, settings: ServerSettings, build: Build) -> int:
    process = Process(role, settings)
    process.log.info("settings", settings=settings.masked())
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, process, stopping, number)
    starting = asyncio.ensure_future(_start(process, build))
    waiting = asyncio.ensure_future(stopping.wait())
    await asyncio.wait((starting, waiting), return_when=asyncio.FIRST_COMPLETED)
    code = 0
    if not starting.done():  # asked to stop while starting
        await end_task(starting)
    elif (error := starting.exception()) is not None:
        known = isinstance(error, PacelineError)
        process.log.error("start failed", error=str(error), exc_info=None if known else error)
        code = 1
    else:
        await waiting
    waiting.cancel()
    await process.shutdown(drain_s=None if process.is_listening else 0.0)
    return code


async def _start(process: Process, build: Build) -> None:
    await build(process)
    await process.start()


def _on_signal(process: Process, stopping: asyncio.Event, number: int) -> None:
    if stopping.is_set():
        process.log.warning("second signal: exiting at once", signal=signal.Signals(number).name)
        os._exit(128 + number)
    process.log.info("signal", signal=signal.Signals(number).name)
    stopping.set()
