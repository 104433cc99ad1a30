"""A policy that an experiment sets, in the place of the scheduler's decisions.

Responsible for: the figures of a policy, their file, and a scheduler that hands out what the file says, or its own
decisions where the file leaves it to them. So one deployment runs every cycle in turn, and cycles can be compared
within seconds of one another.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.contract.errors import DrainingError, InvalidRequestError
from paceline.v1 import scheduler_pb2
from services.scheduler.registry import Registry
from services.scheduler.servicer import SchedulerServicer
from services.scheduler.subject import Subject

POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPolicy:
    """What verifier and drafter are told; the fields are those of paceline.v1.SpeculationPolicy.

    Attributes:
        version: small. The scheduler's own are times of day, so that passes are never taken for one of its own.
    """

    version: int = 1
    draft_length: int = 4
    draft_ahead: int = 0
    num_outcomes: int = 0
    wait_budget_us: int = 0
    max_nodes_per_sequence: int = 64
    max_nodes_per_step: int = 1024

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as `read_policy` reads them."""
        return asdict(self)

    def to_proto(self) -> scheduler_pb2.SpeculationPolicy:
        """As it goes over the wire."""
        return scheduler_pb2.SpeculationPolicy(**self.as_dict(), reason="set by an experiment")


def read_policy(path: Path) -> FixedPolicy | None:
    """Reads a policy's file; None where it holds null, which leaves the policy to the scheduler.

    Raises:
        InvalidRequestError: it is neither.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return None if fields is None else FixedPolicy(**fields)
    except (OSError, ValueError, TypeError) as error:
        raise InvalidRequestError("policy", f"{path.name}: {error}") from None


class FixablePolicyServicer(SchedulerServicer):
    """The scheduler's service, with its policies put aside while a file names one.

    While one is named, the scheduler is told nothing: its decisions rest on passes under its own policies.

    Args:
        registry: the scheduler's subjects.
        draining: set when streams should end.
        path: the file; replaced whole by who changes it.
    """

    def __init__(self, registry: Registry, draining: asyncio.Event, path: Path) -> None:
        super().__init__(registry, draining)
        self._path = path

    async def WatchPolicy(
        self, request: scheduler_pb2.WatchPolicyRequest, context: Any
    ) -> AsyncIterator[scheduler_pb2.WatchPolicyResponse]:
        """The policy in force at once, then whenever another is."""
        state = await self._registry.open(Subject.from_proto(request.key))
        sent: scheduler_pb2.SpeculationPolicy | None = None
        with self._registry.using(state):
            while not self._draining.is_set():
                fixed = read_policy(self._path)
                own = state.policy.to_proto() if state.policy is not None else None
                policy = own if fixed is None else fixed.to_proto()
                if policy is not None and policy != sent:
                    sent = policy
                    yield scheduler_pb2.WatchPolicyResponse(policy=policy)
                await asyncio.sleep(POLL_S)
        raise DrainingError("the experiment is over")

    async def _read(self, context: Any) -> scheduler_pb2.ReportRequest | None:
        """The next frame that the scheduler is to know; frames that name a subject always are."""
        while (request := await super()._read(context)) is not None:
            if request.HasField("key") or read_policy(self._path) is None:
                return request
        return None
