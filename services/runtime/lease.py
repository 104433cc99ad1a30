"""The lease that a bidirectional stream's hello asks for: what was opened on a silent stream is freed.

Responsible for: checking a hello, and waiting for the next frame no longer than the lease. Deliberately does not know
what the frames say. Called by: the servicers of verifier and drafter.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

from paceline import PROTOCOL_VERSION
from paceline.contract.errors import IncompatiblePeerError, InvalidRequestError, StreamProtocolError
from paceline.v1 import peer_pb2

MIN_LEASE_MS, MAX_LEASE_MS = 1_000, 600_000

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
    if not MIN_LEASE_MS <= hello.lease_ms <= MAX_LEASE_MS:
        raise InvalidRequestError("hello.lease_ms", f"must be between {MIN_LEASE_MS} and {MAX_LEASE_MS}")
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
