"""Entry point of the drafter process: settings in, a serving draft loop out."""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor

from services.drafter.settings import DrafterSettings
from services.runtime.cores import plan_pinning, share_interpreter
from services.runtime.lifecycle import serve
from services.runtime.process import Process
from services.runtime.settings import load


def main() -> None:
    """Runs a drafter until a signal ends it."""
    settings = load(DrafterSettings, sys.argv[1:])
    pinning = plan_pinning(settings.cores, settings.threads)
    share_interpreter()

    async def build(process: Process) -> None:
        from services.drafter.host import DrafterHost  # imports torch, after the threads are settled

        # Loading computes too, and the weights it packs should be in memory near the cores that read them.
        with ThreadPoolExecutor(1, initializer=pinning.pin_thread) as loader:
            load = asyncio.get_running_loop().run_in_executor
            host = await load(loader, DrafterHost.load, settings, pinning.num_threads)
        await host.attach(process, pinning.pin_thread)

    serve("drafter", settings, build)


if __name__ == "__main__":
    main()
