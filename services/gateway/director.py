"""The gateway's side of the orchestrator: admission at the director, runs at its conductors.

Responsible for: channels, the deadline of each call, the silence watchdog, and turning failures of either peer
into domain errors. Deliberately does not know: text, clients' requests, retries.

Called by: :mod:`services.gateway.servicer` and the model watch.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator

import grpc
from grpc import aio

from paceline.contract.errors import (
    CapacityError,
    DeadlineError,
    InvalidRequestError,
    PacelineError,
    UnavailableError,
)
from paceline.v1 import orchestrator_pb2, orchestrator_pb2_grpc
from services.runtime.channel import open_channel
from services.runtime.error_mapping import from_rpc_error
from services.runtime.tls import Tls

_MAX_CONDUCTOR_CHANNELS = 64
_ADMIT_TIMEOUT_S = 10.0
_DESCRIBE_TIMEOUT_S = 3.0


class DirectorClient:
    """Calls one director and the conductors that it names.

    Args:
        endpoint: host:port of the director.
        silence_timeout_s: a conductor that sends nothing for this long counts as dead.
        tls: credentials for both.
    """

    def __init__(self, endpoint: str, silence_timeout_s: float, tls: Tls | None = None) -> None:
        self._tls = tls
        self._silence_timeout_s = silence_timeout_s
        self._channel = open_channel(endpoint, tls)
        self._stub = orchestrator_pb2_grpc.DirectorServiceStub(self._channel)
        self._conductors: OrderedDict[str, aio.Channel] = OrderedDict()
        self._num_runs: dict[str, int] = {}

    async def describe(self) -> orchestrator_pb2.DescribeDeploymentResponse:
        """Asks what is deployed.

        Raises:
            PacelineError: the director does not answer.
        """
        try:
            answer: orchestrator_pb2.DescribeDeploymentResponse = await self._stub.DescribeDeployment(
                orchestrator_pb2.DescribeDeploymentRequest(), timeout=_DESCRIBE_TIMEOUT_S
            )
        except aio.AioRpcError as error:
            raise peer_error("director", error) from error
        return answer

    async def admit(
        self, num_prompt_tokens: int, max_new_tokens: int, timeout_s: float
    ) -> orchestrator_pb2.AdmitResponse:
        """Asks for admission.

        Raises:
            CapacityError: no conductor has capacity now.
            UnavailableError: the director does not answer.
            DeadlineError: the caller's deadline has passed.
        """
        request = orchestrator_pb2.AdmitRequest(
            num_prompt_tokens=num_prompt_tokens, max_new_tokens=max_new_tokens
        )
        try:
            admitted: orchestrator_pb2.AdmitResponse = await self._stub.Admit(
                request, timeout=min(timeout_s, _ADMIT_TIMEOUT_S)
            )
        except aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and timeout_s > _ADMIT_TIMEOUT_S:
                raise UnavailableError("the director does not answer") from error
            raise peer_error("director", error) from error
        return admitted

    async def run(
        self, endpoint: str, request: orchestrator_pb2.RunRequest, timeout_s: float
    ) -> AsyncGenerator[orchestrator_pb2.RunResponse, None]:
        """Streams the frames of one run. Closing the iterator cancels the run.

        Raises:
            PacelineError: the conductor failed, fell silent, or ended without a finish reason.
        """
        channel = self._conductor_channel(endpoint)
        self._num_runs[endpoint] = self._num_runs.get(endpoint, 0) + 1
        call = orchestrator_pb2_grpc.ConductorServiceStub(channel).Run(request, timeout=timeout_s)
        try:
            while True:
                try:
                    async with asyncio.timeout(self._silence_timeout_s):
                        frame = await call.read()
                except TimeoutError:
                    raise UnavailableError(
                        f"the conductor has been silent for {self._silence_timeout_s:g} s"
                    ) from None
                except aio.AioRpcError as error:
                    raise peer_error("conductor", error) from error
                if frame is aio.EOF:  # type: ignore[attr-defined]  # missing in the stubs
                    raise UnavailableError("the conductor ended without a finish reason")
                yield frame
        finally:
            call.cancel()
            self._num_runs[endpoint] -= 1
            if self._num_runs[endpoint] == 0:
                del self._num_runs[endpoint]

    def _conductor_channel(self, endpoint: str) -> aio.Channel:
        """The channel to a conductor, kept for the next run. Beyond a limit the oldest idle channels are closed."""
        channel = self._conductors.pop(endpoint, None)
        if channel is None:
            try:
                channel = open_channel(endpoint, self._tls)
            except InvalidRequestError as error:
                raise UnavailableError(
                    f"the director named a conductor without a valid endpoint: {error}"
                ) from error
        self._conductors[endpoint] = channel
        idle = [known for known in self._conductors if known not in self._num_runs and known != endpoint]
        for known in idle[: max(0, len(self._conductors) - _MAX_CONDUCTOR_CHANNELS)]:
            asyncio.get_running_loop().create_task(self._conductors.pop(known).close(None))
        return channel

    async def close(self) -> None:
        """Closes all channels."""
        await asyncio.gather(
            self._channel.close(None), *(channel.close(None) for channel in self._conductors.values())
        )
        self._conductors.clear()


def peer_error(peer: str, error: aio.AioRpcError) -> PacelineError:
    """The error that the gateway's caller gets for a failed call to the orchestrator.

    A rejected field, a lack of capacity and a deadline are passed on. Everything else, whatever its status, is
    a fault behind the gateway, and a retry may succeed: UNAVAILABLE.
    """
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError(f"the deadline passed while the {peer} worked")
    meaning = from_rpc_error(error)
    if isinstance(meaning, InvalidRequestError | CapacityError):
        return meaning
    return UnavailableError(f"{peer}: {meaning}")
