"""The proxy: accepts connections, opens one to the target for each, and hands bytes on when the shaper says.

Responsible for: sockets, order, back-pressure, ends and counts. Deliberately does not know: what the bytes mean. It
runs on the event loop of experiments.link.__main__.

A connection is accepted at once: its set-up does not take the round trip that a real network's would.
"""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from experiments.link.settings import LinkSettings
from experiments.link.shaper import Shaper

MAX_QUEUED_BYTES = 4 << 20
"""Bytes on the way in one direction of a connection, above which no more are read."""


@dataclass(slots=True)
class Counters:
    """Bytes handed on since the start: `forward` to the target, `back` from it."""

    num_connections: int = 0
    forward_bytes: int = 0
    back_bytes: int = 0


@dataclass(slots=True)
class _Pipe:
    """One direction of a connection: what has been read and not yet written."""

    shaper: Shaper
    count: Callable[[int], None]
    loop: asyncio.AbstractEventLoop
    source: asyncio.Transport | None = None
    sink: asyncio.Transport | None = None
    queue: deque[tuple[float, bytes]] = field(default_factory=deque)
    num_queued: int = 0
    timer: asyncio.TimerHandle | None = None
    is_ended: bool = False
    is_sink_full: bool = False

    def push(self, data: bytes) -> None:
        now_s = self.loop.time()
        release_s = self.shaper.release_at(now_s, len(data))
        if not self.queue and release_s <= now_s and self.sink is not None:
            self._write(data)
            return
        self.queue.append((release_s, data))
        self.num_queued += len(data)
        self._throttle()
        self._arm()

    def end(self) -> None:
        """No more will be read; the sink is closed once it has everything."""
        self.is_ended = True
        self._finish()

    def connect(self, sink: asyncio.Transport) -> None:
        """The other side is there now."""
        self.sink = sink
        self._arm()
        self._finish()

    def set_full(self, is_full: bool) -> None:
        """The sink's own buffer is full, or not any more."""
        self.is_sink_full = is_full
        self._throttle()

    def close(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        self.queue.clear()

    def _arm(self) -> None:
        if self.timer is None and self.queue and self.sink is not None:
            self.timer = self.loop.call_at(self.queue[0][0], self._release)

    def _release(self) -> None:
        self.timer = None
        now_s = self.loop.time()
        while self.queue and self.queue[0][0] <= now_s:
            _, data = self.queue.popleft()
            self.num_queued -= len(data)
            self._write(data)
        self._throttle()
        self._arm()
        self._finish()

    def _write(self, data: bytes) -> None:
        assert self.sink is not None
        self.count(len(data))
        if not self.sink.is_closing():
            self.sink.write(data)

    def _throttle(self) -> None:
        if self.source is None or self.source.is_closing():
            return
        if self.is_sink_full or self.num_queued > MAX_QUEUED_BYTES:
            self.source.pause_reading()
        else:
            self.source.resume_reading()

    def _finish(self) -> None:
        if self.is_ended and not self.queue and self.sink is not None and not self.sink.is_closing():
            self.sink.close()


class _End(asyncio.Protocol):
    """One socket of a connection: what it reads goes into `outward`, what it writes comes out of `inward`."""

    def __init__(self, outward: _Pipe, inward: _Pipe, on_made: Callable[[], None]) -> None:
        self._outward = outward
        self._inward = inward
        self._on_made = on_made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._outward.source = transport
        self._inward.connect(transport)
        self._on_made()

    def data_received(self, data: bytes) -> None:
        self._outward.push(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._inward.close()
        self._outward.end()

    def pause_writing(self) -> None:
        self._inward.set_full(True)

    def resume_writing(self) -> None:
        self._inward.set_full(False)


class Link:
    """One listening port in front of one target.

    Args:
        target: host and port.
        seed: of the jitter; each connection and direction gets its own.

    Attributes:
        counters: bytes handed on.
    """

    def __init__(self, target: tuple[str, int], seed: int = 0) -> None:
        self.counters = Counters()
        self._target = target
        self._seeds = itertools.count(2 * seed << 32, 2)
        self._forward = self._back = LinkSettings()
        self._pipes: list[tuple[_Pipe, _Pipe]] = []
        self._dials: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._started_s = 0.0

    async def start(self, port: int = 0) -> int:
        """Listens on loopback; returns the port."""
        loop = asyncio.get_running_loop()
        self._started_s = loop.time()
        self._server = await loop.create_server(self._accept, "127.0.0.1", port)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    def set(self, forward: LinkSettings, back: LinkSettings) -> None:
        """Changes what happens to bytes that come in from now on."""
        self._forward, self._back = forward, back
        for to_target, from_target in self._pipes:
            to_target.shaper.settings, from_target.shaper.settings = forward, back

    async def close(self) -> None:
        """Stops listening and closes every connection."""
        if self._server is not None:
            self._server.close()
        for dial in self._dials:
            dial.cancel()
        for pair in self._pipes:
            for pipe in pair:
                pipe.close()
                if pipe.source is not None:
                    pipe.source.abort()

    def _accept(self) -> asyncio.Protocol:
        loop = asyncio.get_running_loop()
        seed = next(self._seeds)
        counters = self.counters
        counters.num_connections += 1

        def count_forward(num_bytes: int) -> None:
            counters.forward_bytes += num_bytes

        def count_back(num_bytes: int) -> None:
            counters.back_bytes += num_bytes

        forward = _Pipe(Shaper(self._forward, self._started_s, seed), count_forward, loop)
        back = _Pipe(Shaper(self._back, self._started_s, seed + 1), count_back, loop)
        self._pipes = [pair for pair in self._pipes if not _is_over(pair)]
        self._pipes.append((forward, back))

        def dial() -> None:
            task = loop.create_task(self._dial(forward, back))
            self._dials.add(task)
            task.add_done_callback(self._dials.discard)

        return _End(forward, back, dial)

    async def _dial(self, forward: _Pipe, back: _Pipe) -> None:
        """Opens the connection to the target; where that fails, the client's is closed."""
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(lambda: _End(back, forward, lambda: None), *self._target)
        except OSError:
            if forward.source is not None:
                forward.source.abort()


def _is_over(pair: tuple[_Pipe, _Pipe]) -> bool:
    return all(pipe.is_ended and not pipe.queue for pipe in pair)


def precise_loop() -> asyncio.AbstractEventLoop:
    """An event loop whose timers are right to some tens of microseconds.

    The usual ones wait in epoll or in libuv, which count whole milliseconds; select takes microseconds, and a link has
    few sockets.
    """
    return asyncio.SelectorEventLoop(selectors.SelectSelector())
