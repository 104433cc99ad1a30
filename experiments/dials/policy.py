"""A policy that an experiment sets, in the place of the scheduler's decisions.

Responsible for: the figures of a policy, their file, and a SchedulerService that hands out what the file says. So one
deployment runs every cycle in turn, and cycles can be compared within seconds of one another.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import DrainingError, InvalidRequestError
from paceline.v1 import scheduler_pb2, scheduler_pb2_grpc

POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPolicy:
    """What verifier and drafter are told; the fields are those of paceline.v1.SpeculationPolicy."""

    version: int = 1
    draft_length: int = 4
    draft_ahead: int = 0
    outcomes: int = 0
    hold_us: int = 0
    max_nodes_per_sequence: int = 64
    max_nodes_per_step: int = 1024

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as `read` reads them."""
        return asdict(self)

    @classmethod
    def read(cls, path: Path) -> FixedPolicy:
        """Reads a policy's file.

        Raises:
            InvalidRequestError: it is not one.
        """
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise InvalidRequestError("policy", f"{path.name}: {error}") from None

    def to_proto(self) -> scheduler_pb2.SpeculationPolicy:
        """As it goes over the wire."""
        return scheduler_pb2.SpeculationPolicy(**self.as_dict(), reason="set by an experiment")


class FixedPolicyServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Hands out the file's policy, and takes measurements without using them.

    Args:
        path: the file; replaced whole by who changes it.
        draining: set when streams should end.
    """

    def __init__(self, path: Path, draining: asyncio.Event) -> None:
        self._path = path
        self._draining = draining

    async def Report(
        self, request_iterator: AsyncIterator[scheduler_pb2.ReportRequest], context: Any
    ) -> scheduler_pb2.ReportResponse:
        """Takes measurements until the caller ends the stream, or the process."""
        num_frames = 0
        async for _ in request_iterator:
            num_frames += 1
            if self._draining.is_set():
                raise DrainingError("the experiment is over")
        return scheduler_pb2.ReportResponse(num_frames=num_frames)

    async def WatchPolicy(
        self, request: scheduler_pb2.WatchPolicyRequest, context: Any
    ) -> AsyncIterator[scheduler_pb2.WatchPolicyResponse]:
        """The policy at once, then whenever the file was replaced."""
        sent: FixedPolicy | None = None
        while not self._draining.is_set():
            policy = FixedPolicy.read(self._path)
            if policy != sent:
                sent = policy
                yield scheduler_pb2.WatchPolicyResponse(policy=policy.to_proto())
            await asyncio.sleep(POLL_S)
        raise DrainingError("the experiment is over")
