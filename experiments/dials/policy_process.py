"""`python -m experiments.dials.policy_process`: the scheduler, with policies from a file while it names one.

Takes all flags of the scheduler, so that a deployment can start it in its place.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from experiments.dials.policy import FixablePolicyServicer, read_policy
from services.runtime.lifecycle import serve
from services.runtime.process import Process
from services.runtime.settings import load
from services.scheduler.__main__ import build as build_scheduler
from services.scheduler.settings import SchedulerSettings


class FixablePolicySettings(SchedulerSettings):
    """Serves a policy from a file, or the scheduler's own, for experiments alone."""

    model_config = SettingsConfigDict(env_prefix="PACELINE_FIXED_POLICY_")

    policy: Path = Field(
        description="JSON file of the policy, read again whenever it was replaced; null: the scheduler's own"
    )


def main() -> None:
    """Serve until told to end."""
    settings = load(FixablePolicySettings, sys.argv[1:])

    async def build(process: Process) -> None:
        read_policy(settings.policy)  # a bad file ends the start, not a stream
        await build_scheduler(
            process, lambda registry, draining: FixablePolicyServicer(registry, draining, settings.policy)
        )

    serve("scheduler", settings, build)


if __name__ == "__main__":
    main()
