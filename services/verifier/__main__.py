"""Entry point of the verifier process: settings in, a serving step loop out."""

from __future__ import annotations

import asyncio
import sys

from services.runtime.cores import pin
from services.runtime.lifecycle import Process, serve
from services.runtime.settings import load
from services.verifier.settings import Settings


def main() -> None:
    """Run a verifier until it is told to end."""
    settings = load(Settings, sys.argv[1:])
    pinning = pin(settings.cores, settings.threads)

    async def build(process: Process) -> None:
        from services.verifier.host import Host  # imports torch, after the threads are settled

        host = await asyncio.to_thread(Host.load, settings, pinning.num_threads)
        await host.attach(process)

    serve("verifier", settings, build)


if __name__ == "__main__":
    main()
