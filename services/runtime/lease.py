"""The lease that a bidirectional stream's hello requests: the sequences of a silent stream are freed when it
expires.

Responsible for: checking a hello, and waiting for the next frame no longer than the lease. Deliberately does
not know: what the frames say. Called by: the servicers of verifier and drafter.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

from paceline import PROTOCOL_VERSION
from paceline.contract.errors import IncompatiblePeerError, StreamProtocolError
from paceline.contract.fields import check_integer
from paceline.contract.limits import MAX_LEASE_MS, MIN_LEASE_MS
from paceline.v1 import peer_pb2

FrameT = TypeVar("FrameT")


def check_hello(hello: peer_pb2.StreamHello) -> float:
    """The lease in seconds.

    Raises:
        IncompatiblePeerError: the caller speaks another version.
        InvalidRequestError: the lease is out of range.
    """
    if hello.protocol_version != PROTOCOL_VERSION:
        raise IncompatiblePeerError(
            f"the caller speaks protocol version {hello.protocol_version}, this process {PROTOCOL_VERSION}"
        )
    check_integer("hello.lease_ms", hello.lease_ms, MIN_LEASE_MS, MAX_LEASE_MS, "milliseconds")
    return hello.lease_ms / 1000


async def next_frame(frames: AsyncIterator[FrameT], lease_s: float) -> FrameT | None:
    """The next frame; None at the end of the stream.

    Raises:
        StreamProtocolError: none came within the lease.
    """
    try:
        # Not asyncio.wait_for: on Python 3.11 it can swallow a cancellation, and the stream would not end.
        async with asyncio.timeout(lease_s):
            return await anext(frames, None)
    except TimeoutError:
        raise StreamProtocolError(f"no frame for {lease_s:g} s: the lease ran out") from None
