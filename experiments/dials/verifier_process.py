"""`python -m experiments.dials.verifier_process`: the verifier service around a target whose steps are stretched.

Takes all flags of the verifier and ``--step-curve``. Everything but the duration of a pass is the service's own.
"""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from experiments.dials.step_clock import StepClock, StretchCurve, StretchedExecutor
from services.runtime.cores import plan_pinning
from services.runtime.lifecycle import serve
from services.runtime.process import Process
from services.runtime.settings import load
from services.verifier.host import VerifierHost
from services.verifier.settings import VerifierSettings


class StretchedSettings(VerifierSettings):
    """Paceline verifier with stretched steps, for experiments alone."""

    model_config = SettingsConfigDict(env_prefix="PACELINE_STRETCHED_VERIFIER_")

    step_curve: str = Field(description="each step lasts so many ms, or by its rows as in 1:30,16:30,64:48")

    @field_validator("step_curve")
    @classmethod
    def _check_step_curve(cls, text: str) -> str:
        StretchCurve.parse(text)
        return text


def stretch(host: VerifierHost, step_curve: str) -> None:
    """Make a host's passes last as long as a curve says; before the host serves."""
    engine = host.engine
    engine.executor = StretchedExecutor(engine.executor, StepClock(StretchCurve.parse(step_curve)))


def main() -> None:
    """Serve until told to end."""
    settings = load(StretchedSettings, sys.argv[1:])
    pinning = plan_pinning(settings.cores, settings.threads)

    async def build(process: Process) -> None:
        with ThreadPoolExecutor(1, initializer=pinning.pin_thread) as loader:
            run = asyncio.get_running_loop().run_in_executor
            host = await run(loader, VerifierHost.load, settings, pinning.num_threads)
        stretch(host, settings.step_curve)
        await host.attach(process, pinning.pin_thread)

    serve("verifier", settings, build)


if __name__ == "__main__":
    main()
