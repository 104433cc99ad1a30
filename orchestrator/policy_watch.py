"""The subscription to the scheduler's policy.

Responsible for: one WatchPolicy stream for the present measurement key, opened again when it ends. The last policy
stays in force meanwhile. Deliberately does not know what a policy means. Run by orchestrator.conductor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import structlog

from orchestrator.peer_stream import END
from paceline.contract.policy import SpeculationPolicy
from paceline.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.runtime.channel import open_channel
from services.runtime.tls import Tls

KEY_POLL_S = 0.1
BACKOFF_S = (0.2, 5.0)

log = structlog.get_logger()


class PolicyWatch:
    """One subscription.

    Attributes:
        accepted_key: what the last policy that arrived was made for; None before the first.
    """

    def __init__(
        self,
        endpoint: str,
        tls: Tls | None,
        key: Callable[[], scheduler_pb2.MeasurementKey | None],
        accept: Callable[[SpeculationPolicy], None],
    ) -> None:
        self._endpoint = endpoint
        self._tls = tls
        self._key = key
        self._accept = accept
        self.accepted_key: scheduler_pb2.MeasurementKey | None = None

    async def run(self) -> None:
        """Watches until cancelled."""
        backoff_s, reason = BACKOFF_S[0], ""
        while True:
            key = self._key()
            if key is None:  # the subject is not known before the verifier has been reached
                await asyncio.sleep(KEY_POLL_S)
                continue
            try:
                await self._watch(key)
                backoff_s, reason = BACKOFF_S[0], ""
            except grpc.aio.AioRpcError as error:
                if error.code().name != reason:
                    reason = error.code().name
                    log.warning("policy watch down; the last policy stays in force", reason=reason)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, BACKOFF_S[1])

    async def _watch(self, key: scheduler_pb2.MeasurementKey) -> None:
        """Takes policies until the stream ends or another key is in force."""
        channel = open_channel(self._endpoint, self._tls)
        try:
            call = scheduler_pb2_grpc.SchedulerServiceStub(channel).WatchPolicy(
                scheduler_pb2.WatchPolicyRequest(key=key)
            )
            reading = asyncio.create_task(call.read())
            while True:
                done, _ = await asyncio.wait((reading,), timeout=10 * KEY_POLL_S)
                if not done:
                    if self._key() != key:
                        reading.cancel()
                        return
                    continue
                response = reading.result()
                if response is END:
                    await asyncio.sleep(BACKOFF_S[0])
                    return
                policy = SpeculationPolicy.from_proto(response.policy)
                log.info(
                    "policy", version=policy.version, draft_length=policy.draft_length, reason=policy.reason
                )
                self._accept(policy)
                self.accepted_key = key
                reading = asyncio.create_task(call.read())
        finally:
            await channel.close(None)
