"""A conductor in a process of its own, without Ray around it: `python -m experiments.hop.conductor VERIFIER DRAFTER`.

It ends with its standard input.
"""

from __future__ import annotations

import asyncio
import sys

import uvloop

from orchestrator.conductor import Conductor
from orchestrator.settings import OrchestratorSettings


async def main() -> None:
    """Run until standard input ends."""
    verifier, drafter = sys.argv[1:]
    settings = OrchestratorSettings.model_validate(
        {"verifiers": (verifier,), "drafters": (drafter,), "draft_length": 4, "draft_ahead": 0}
    )
    conductor = Conductor(settings, verifier, "127.0.0.1")
    while not (status := await conductor.start()).drafters or not status.is_ready:
        await asyncio.sleep(0.05)
    sys.stdout.write(f"ready {status.endpoint}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await conductor.shutdown(0.0)


if __name__ == "__main__":
    uvloop.run(main())
