"""`python -m experiments.dials.policy_process`: a policy from a file, served where the scheduler would be.

Takes all flags of the scheduler, so that a deployment can start it in its place, and uses those of a server alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from experiments.dials.policy import FixedPolicy, FixedPolicyServicer
from paceline.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.runtime.lifecycle import Process, serve
from services.runtime.settings import load
from services.scheduler.settings import SchedulerSettings


class FixedPolicySettings(SchedulerSettings):
    """Serves a policy from a file, for experiments alone."""

    model_config = SettingsConfigDict(env_prefix="PACELINE_FIXED_POLICY_")

    policy: Path = Field(description="JSON file of the policy, read again whenever it was replaced")


def main() -> None:
    """Serve until told to end."""
    settings = load(FixedPolicySettings, sys.argv[1:])

    async def build(process: Process) -> None:
        FixedPolicy.read(settings.policy)  # a bad file ends the start, not a stream
        servicer = FixedPolicyServicer(settings.policy, process.draining)
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(servicer, process.server)
        process.add_service_name(scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name)
        await process.ready()

    serve("scheduler", settings, build)


if __name__ == "__main__":
    main()
