"""Entry point of the verifier process: settings in, a serving step loop out."""

from __future__ import annotations

import asyncio
import sys

from services.runtime.cores import plan_pinning
from services.runtime.lifecycle import Process, serve
from services.runtime.settings import load
from services.verifier.settings import Settings


def main() -> None:
    """Run a verifier until it is told to end."""
    settings = load(Settings, sys.argv[1:])
    pinning = plan_pinning(settings.cores, settings.threads)

    async def build(process: Process) -> None:
        from services.verifier.host import Host  # imports torch, after the threads are settled

        host = await asyncio.to_thread(Host.load, settings, pinning.num_threads)
        await host.attach(process, pinning.pin_thread)

    serve("verifier", settings, build)


if __name__ == "__main__":
    main()
