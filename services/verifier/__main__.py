"""Entry point of the verifier process: settings in, a serving step loop out."""

from __future__ import annotations

import asyncio
import gc
import sys
from concurrent.futures import ThreadPoolExecutor

from services.runtime.cores import plan_pinning, share_interpreter
from services.runtime.lifecycle import serve
from services.runtime.process import Process
from services.runtime.settings import load
from services.verifier.settings import VerifierSettings


def main() -> None:
    """Run a verifier until a signal ends it."""
    settings = load(VerifierSettings, sys.argv[1:])
    pinning = plan_pinning(settings.cores, settings.threads)
    share_interpreter()

    async def build(process: Process) -> None:
        from services.verifier.host import VerifierHost  # imports torch, after the threads are settled

        # Loading computes too, and packed weights should be in memory near the cores that read them.
        with ThreadPoolExecutor(1, initializer=pinning.pin_thread) as loader:
            load = asyncio.get_running_loop().run_in_executor
            host = await load(loader, VerifierHost.load, settings, pinning.num_threads)
        gc.collect()
        gc.freeze()  # what was loaded stays: a collection between two passes need not go through it
        await host.attach(process, pinning.pin_thread)

    serve("verifier", settings, build)


if __name__ == "__main__":
    main()
