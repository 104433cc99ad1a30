"""One bidirectional stream to a peer, opened again whenever it ends.

Responsible for: connecting, the hello on both sides, one reader and one writer, heartbeats that keep the lease,
a watchdog for silence, and back-off between attempts. Deliberately does not know what frames mean: the link that owns
the stream does (orchestrator.peer_link).

Frames are never queued one by one. A link merges its messages into one pending frame, and the writer takes the frame
when the transport is ready. So a slow peer costs the memory of one frame, and a fast peer gets each event at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any, Generic, TypeVar

import grpc
import structlog

from orchestrator.peer_link import PeerLink, StreamTiming
from paceline import PROTOCOL_VERSION
from paceline.contract.errors import (
    IncompatiblePeerError,
    PacelineError,
    StreamProtocolError,
    UnavailableError,
)
from paceline.v1 import peer_pb2
from services.runtime.channel import open_channel
from services.runtime.error_mapping import from_rpc_error
from services.runtime.tls import Tls

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")

END: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # absent in the stubs


class PeerStream(Generic[RequestT, ResponseT]):
    """The stream of one link."""

    def __init__(
        self,
        endpoint: str,
        link: PeerLink[RequestT, ResponseT],
        *,
        client_id: str,
        role: str,
        timing: StreamTiming,
        tls: Tls | None,
    ) -> None:
        self.endpoint = endpoint
        self.is_up = False
        self.last_reason = "not connected yet"
        self._link = link
        self._client_id = client_id
        self._timing = timing
        self._tls = tls
        self._wake = asyncio.Event()
        self._dropping = asyncio.Event()
        self._drop_reason = ""
        self._last_write = 0.0
        self._jitter = random.Random(f"{client_id} {endpoint}")
        self._log = structlog.get_logger().bind(peer=role, endpoint=endpoint)

    def wake(self) -> None:
        """Lets the writer take the pending frame."""
        self._wake.set()

    def drop(self, reason: str) -> None:
        """Ends the open stream; it is opened again as after any other end."""
        self._drop_reason = reason
        self._dropping.set()

    async def run(self) -> None:
        """Keeps the stream open until cancelled."""
        backoff_s = self._timing.min_backoff_s
        while True:
            was_up, reason = await self._serve_once()
            if reason != self.last_reason or was_up:
                self._log.warning("stream down", reason=reason, was_up=was_up)
            self.last_reason = reason
            backoff_s = (
                self._timing.min_backoff_s if was_up else min(2 * backoff_s, self._timing.max_backoff_s)
            )
            await asyncio.sleep(backoff_s * self._jitter.uniform(0.5, 1.0))

    async def _serve_once(self) -> tuple[bool, str]:
        """One connection, from Describe to its end; returns whether it was up, and why it ended."""
        was_up = False
        reason = "cancelled"
        channel = open_channel(self.endpoint, self._tls)
        try:
            info, call = await self._connect(channel)
            self._dropping.clear()
            self.is_up = was_up = True
            self._log.info(
                "stream up", instance_id=info.instance_id, model=info.model_name, method=info.method
            )
            self._link.went_up(info)
            await self._pump(call)
            reason = "the peer ended the stream"
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {from_rpc_error(error)}"
        except TimeoutError:
            reason = f"no answer within {self._timing.connect_timeout_s:g} s"
        except (PacelineError, asyncio.InvalidStateError, grpc.aio.UsageError) as error:
            reason = str(error)
        except Exception as error:  # a bug in a handler may cost this connection, but not the process
            self._log.exception("stream handler failed")
            reason = f"{type(error).__name__}: {error}"
        finally:
            if self.is_up:
                self.is_up = False
                self._link.went_down(reason)
            await channel.close(None)
        return was_up, reason

    async def _connect(self, channel: grpc.aio.Channel) -> tuple[peer_pb2.PeerInfo, Any]:
        timeout_s = self._timing.connect_timeout_s
        self._link.check(await self._link.describe(channel, timeout_s))
        call = self._link.call(channel)
        hello = peer_pb2.StreamHello(
            protocol_version=PROTOCOL_VERSION,
            client_id=self._client_id,
            lease_ms=int(self._timing.lease_s * 1000),
        )
        async with asyncio.timeout(timeout_s):
            await call.write(self._link.hello(hello))
            self._last_write = asyncio.get_running_loop().time()
            first = await call.read()
        if first is END:
            await _raise_status(call)
        info = self._link.hello_of(first)
        if info is None:
            raise StreamProtocolError("the peer's first frame carries no hello")
        self._link.check(info)
        return info, call

    async def _pump(self, call: Any) -> None:
        """Reads, writes and watches until the first of them ends."""
        tasks = [
            asyncio.create_task(self._read(call)),
            asyncio.create_task(self._write(call)),
            asyncio.create_task(self._watch()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:  # the reader knows the stream's status, so its error comes first
                if task in done:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            call.cancel()

    async def _read(self, call: Any) -> None:
        while (frame := await call.read()) is not END:
            self._link.received(frame)
        await _raise_status(call)

    async def _write(self, call: Any) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            self._wake.clear()
            is_due = loop.time() - self._last_write >= self._timing.heartbeat_s
            while (frame := self._link.take(is_due)) is not None:
                is_due = False
                self._last_write = loop.time()
                await call.write(frame)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s = min(self._timing.heartbeat_s, self._timing.silence_s) / 4
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._dropping.wait()
                raise UnavailableError(self._drop_reason)
            now = loop.time()
            silent_s = self._link.silent_for(now)
            if silent_s > self._timing.silence_s:
                raise UnavailableError(f"no answer for {silent_s:.1f} s")
            if now - self._last_write >= self._timing.heartbeat_s:
                self._wake.set()


async def _raise_status(call: Any) -> None:
    """Raises the error of a call that has ended, if it ended with one."""
    code = await call.code()
    if code is not grpc.StatusCode.OK:
        error = grpc.aio.AioRpcError(
            code,
            await call.initial_metadata(),
            await call.trailing_metadata(),
            details=await call.details(),
            debug_error_string=None,
        )
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            raise IncompatiblePeerError(str(from_rpc_error(error)))
        raise error
