"""What every stream of a service shares: the lease its hello asks for, and the outbox a thread writes to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from paceline import PROTOCOL_VERSION
from paceline.contract.errors import IncompatiblePeerError, InvalidRequestError, StreamProtocolError
from paceline.v1 import peer_pb2
from services.runtime.lease import check_hello, next_frame
from services.runtime.outbox import Outbox


def hello(**fields: int) -> peer_pb2.StreamHello:
    return peer_pb2.StreamHello(**{"protocol_version": PROTOCOL_VERSION, "lease_ms": 5000, **fields})


def test_hello_names_the_lease() -> None:
    assert check_hello(hello()) == 5.0
    with pytest.raises(IncompatiblePeerError):
        check_hello(hello(protocol_version=PROTOCOL_VERSION + 1))
    for lease_ms in (0, 999, 600_001):
        with pytest.raises(InvalidRequestError, match=r"hello\.lease_ms"):
            check_hello(hello(lease_ms=lease_ms))


async def frames(*values: int, then_hang: bool = False) -> AsyncIterator[int]:
    for value in values:
        yield value
    if then_hang:
        await asyncio.Event().wait()


async def test_frames_come_in_order_until_the_end() -> None:
    stream = frames(1, 2)
    assert [await next_frame(stream, 5.0) for _ in range(3)] == [1, 2, None]


async def test_silence_ends_the_lease() -> None:
    with pytest.raises(StreamProtocolError, match="lease"):
        await next_frame(frames(then_hang=True), 0.02)


async def test_cancelling_is_never_swallowed() -> None:
    """Also not where a frame comes in at the moment of the cancellation, as wait_for does on Python 3.11."""
    arrived = asyncio.Event()

    async def one_frame() -> AsyncIterator[int]:
        await arrived.wait()
        yield 1

    reading = asyncio.create_task(next_frame(one_frame(), 5.0))
    await asyncio.sleep(0)
    arrived.set()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_outbox_hands_over_in_order_and_cuts_off_a_reader_that_does_not_keep_up() -> None:
    outbox: Outbox[int] = Outbox(asyncio.get_running_loop(), 2)
    await asyncio.to_thread(lambda: [outbox.push(1), outbox.push(2)])
    assert [await outbox.pop(), await outbox.pop()] == [1, 2]
    assert not outbox.is_overrun
    for value in (3, 4, 5):
        outbox.push(value)
    await asyncio.sleep(0)
    assert outbox.is_overrun
    assert [await outbox.pop(), await outbox.pop()] == [3, 4]
