"""A real gateway in a thread of its own, in front of a scripted orchestrator, for clients in the test's thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.client import AsyncPacelineClient
from paceline.contract.errors import UnavailableError
from services.gateway.__main__ import build
from services.gateway.settings import GatewaySettings
from tests.gateway.scripted_conductor import Script, ScriptedConductor, scripted_orchestrator
from tests.gateway.tiny_model import write_model_dir
from tests.hosting import hosted

Serve = Callable[..., "Served"]


@dataclass
class Served:
    """What runs: where the gateway is, and the conductor behind it."""

    endpoint: str
    conductor: ScriptedConductor


class ServerThread:
    """An event loop in a thread; a synchronous test must not run in the server's own."""

    def __init__(self, model_dir: Path, script: Script, fields: dict) -> None:
        self._model_dir, self._script, self._fields = model_dir, script, fields
        self._started: Future[Served] = Future()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._run()))

    async def _run(self) -> None:
        try:
            async with AsyncExitStack() as stack:
                conductor = await stack.enter_async_context(scripted_orchestrator(self._script))
                settings = GatewaySettings(
                    model=str(self._model_dir),
                    orchestrator=conductor.endpoint,
                    port=0,
                    metrics_port=None,
                    refresh_s=0.05,
                    drain_s=0.2,
                    **self._fields,
                )
                process = await stack.enter_async_context(hosted("gateway", settings, build))
                async with AsyncPacelineClient(f"127.0.0.1:{process.port}") as client:
                    await _until_known(client)
                self._started.set_result(Served(f"127.0.0.1:{process.port}", conductor))
                await self._stop.wait()
        except BaseException as error:
            if not self._started.done():
                self._started.set_exception(error)
            raise

    def __enter__(self) -> Served:
        self._thread.start()
        return self._started.result(timeout=20)

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout=20)
        self._loop.close()


async def _until_known(client: AsyncPacelineClient) -> None:
    """Waits until the gateway knows what is served."""
    async with asyncio.timeout(20):
        while True:
            with suppress(UnavailableError):
                await client.model_info()
                return
            await asyncio.sleep(0.01)


@contextmanager
def serving(directory: Path) -> Iterator[Serve]:
    """Gives a function that starts a gateway in front of a script; all end with the block."""
    model_dir = write_model_dir(directory)
    with ExitStack() as stack:

        def start(script: Script, **fields) -> Served:
            return stack.enter_context(ServerThread(model_dir, script, fields))

        yield start
