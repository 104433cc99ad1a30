"""The link: when bytes come out, measured with an n-gram proposal server, and what it must not do to them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from statistics import median

import psutil
import pytest

from experiments.link.process import LinkProcess
from experiments.link.settings import LinkSettings
from experiments.link.shaper import Shaper
from paceline.contract.errors import InvalidRequestError, UnavailableError
from paceline.embedded.ports import is_free

NUM_PINGS = 40
PATIENCE_S = 20.0
"""Other work on the machine may delay a whole batch of pings; the link is right if a batch within this time is."""


class EchoServer:
    """Sends back what comes in, a thread for each connection."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for a connection
        self._socket.close()
        self._accepting.join(10)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._echo, args=(connection,), daemon=True).start()

    @staticmethod
    def _echo(connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(1 << 16):
                    connection.sendall(data)
            except OSError:
                return


@pytest.fixture(scope="module")
def echo() -> Iterator[EchoServer]:
    server = EchoServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def link(echo: EchoServer) -> Iterator[LinkProcess]:
    with LinkProcess({"echo": f"127.0.0.1:{echo.port}", "nowhere": "127.0.0.1:1"}) as up:
        yield up


@pytest.fixture(autouse=True)
def _untouched(link: LinkProcess) -> None:
    link.set("echo", LinkSettings())


def connect(endpoint: str) -> socket.socket:
    host, _, port = endpoint.rpartition(":")
    made = socket.create_connection((host, int(port)), timeout=20)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def ping_ms(connection: socket.socket, size: int = 200) -> float:
    begun_s = time.perf_counter()
    connection.sendall(b"x" * size)
    left = size
    while left:
        got = len(connection.recv(left))
        assert got, "the connection ended"
        left -= got
    return (time.perf_counter() - begun_s) * 1e3


def added_ms(direct: socket.socket, through: socket.socket, num_pings: int = NUM_PINGS) -> float:
    """What the link adds to a round trip in the median; both are measured in turn."""
    ping_ms(direct), ping_ms(through)
    pairs = [(ping_ms(direct), ping_ms(through)) for _ in range(num_pings)]
    return median(through_ms for _, through_ms in pairs) - median(direct_ms for direct_ms, _ in pairs)


@pytest.mark.parametrize("round_trip_ms", [0.0, 1.0, 5.0, 20.0, 50.0])
def test_the_round_trip_is_as_set(echo: EchoServer, link: LinkProcess, round_trip_ms: float) -> None:
    link.set_round_trip("echo", round_trip_ms)
    allowed_ms = max(0.5, 0.05 * round_trip_ms) if round_trip_ms else 0.3
    found: list[float] = []
    with connect(f"127.0.0.1:{echo.port}") as direct, connect(link.endpoint("echo")) as through:
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            found.append(added_ms(direct, through, NUM_PINGS if round_trip_ms < 20 else 15))
            if abs(found[-1] - round_trip_ms) <= allowed_ms:
                return
    pytest.fail(f"set {round_trip_ms} ms, added {min(found)} to {max(found)} ms")


def test_directions_differ_and_settings_change_while_connected(link: LinkProcess) -> None:
    with connect(link.endpoint("echo")) as through:
        ping_ms(through)
        link.set("echo", LinkSettings(delay_ms=30), LinkSettings())
        assert 30 <= ping_ms(through) < 60
        link.set("echo", LinkSettings(delay_ms=30), LinkSettings(delay_ms=40))
        assert 70 <= ping_ms(through) < 110
        link.set("echo", LinkSettings())
        assert min(ping_ms(through) for _ in range(20)) < 5


def test_bandwidth(link: LinkProcess) -> None:
    link.set("echo", LinkSettings(mbit_per_s=40), LinkSettings())
    with connect(link.endpoint("echo")) as through:
        assert 100 <= ping_ms(through, size=500_000) < 300


def test_counters(link: LinkProcess) -> None:
    before = link.counters()["echo"]
    with connect(link.endpoint("echo")) as through:
        ping_ms(through, size=12_345)
    after = link.counters()["echo"]
    assert after.forward_bytes - before.forward_bytes == 12_345
    assert after.back_bytes - before.back_bytes == 12_345
    assert after.num_connections - before.num_connections == 1


def test_bytes_arrive_whole_and_in_order_past_a_slow_reader(link: LinkProcess) -> None:
    """More than the link queues, with jitter; nobody reads for the first while, so that it has to stop reading."""
    link.set("echo", LinkSettings(delay_ms=1, jitter_ms=3))
    sent = random.Random(4).randbytes(24 << 20)
    with connect(link.endpoint("echo")) as through:
        writer = threading.Thread(target=through.sendall, args=(sent,))
        writer.start()
        time.sleep(0.3)
        received = bytearray()
        while len(received) < len(sent):
            got = through.recv(1 << 20)
            assert got, "the connection ended"
            received += got
        writer.join(20)
    assert hashlib.sha256(received).digest() == hashlib.sha256(sent).digest()


def test_an_end_comes_after_everything_before_it(link: LinkProcess) -> None:
    link.set("echo", LinkSettings(), LinkSettings(delay_ms=60))
    with connect(link.endpoint("echo")) as through:
        through.sendall(b"last words")
        time.sleep(0.02)  # they are on their way back
        assert through.recv(100) == b"last words"
    with socket.create_server(("127.0.0.1", 0)) as server:
        target = f"127.0.0.1:{server.getsockname()[1]}"
        with LinkProcess({"one": target}) as own:
            own.set("one", LinkSettings(), LinkSettings(delay_ms=60))
            with connect(own.endpoint("one")) as client:
                peer, _ = server.accept()
                peer.sendall(b"good bye")
                peer.close()
                assert client.recv(100) == b"good bye"
                assert client.recv(100) == b""


def test_a_target_that_is_not_there_ends_the_connection(link: LinkProcess) -> None:
    with connect(link.endpoint("nowhere")) as through, contextlib.suppress(ConnectionResetError):
        assert through.recv(10) == b""


def test_bad_commands_are_answered_and_change_nothing(link: LinkProcess) -> None:
    with pytest.raises(InvalidRequestError):
        link.set("elsewhere", LinkSettings())
    assert set(link.counters()) == {"echo", "nowhere"}


def test_nothing_is_left_behind(echo: EchoServer) -> None:
    with LinkProcess({"echo": f"127.0.0.1:{echo.port}"}) as own:
        pid, port = own.pid, int(own.endpoint("echo").rpartition(":")[2])
        held = connect(own.endpoint("echo"))
        ping_ms(held)
        assert not is_free(port)
    held.close()
    assert not psutil.pid_exists(pid)
    assert is_free(port)


def test_a_process_that_died_is_told(echo: EchoServer) -> None:
    with LinkProcess({"echo": f"127.0.0.1:{echo.port}"}) as own:
        psutil.Process(own.pid).kill()
        psutil.wait_procs([psutil.Process(own.pid)], timeout=10)
        with pytest.raises(UnavailableError):
            own.counters()
    with pytest.raises(UnavailableError), LinkProcess({"bad": "no port"}):
        pass


# The arithmetic.


def test_jitter_is_seeded_has_its_mean_and_keeps_the_order() -> None:
    settings = LinkSettings(delay_ms=5, jitter_ms=2)

    def delays(seed: int, gap_s: float) -> list[float]:
        shaper = Shaper(settings, 0.0, seed)
        return [shaper.release_at(index * gap_s, 100) - index * gap_s for index in range(4000)]

    apart = delays(1, 1.0)
    assert apart == delays(1, 1.0)
    assert apart != delays(2, 1.0)
    assert min(apart) >= 0.005 - 1e-9
    assert abs(sum(apart) / len(apart) - 0.007) < 0.0003
    shaper = Shaper(settings, 0.0, 1)
    close = [shaper.release_at(index * 1e-4, 100) for index in range(4000)]
    assert close == sorted(close)
    assert len(set(close)) < 3000  # many waited for one before them


def test_bandwidth_queues() -> None:
    shaper = Shaper(LinkSettings(delay_ms=10, mbit_per_s=8), 0.0, 0)  # a byte takes a microsecond
    assert shaper.release_at(1.0, 1000) == pytest.approx(1.011)
    assert shaper.release_at(1.0, 1000) == pytest.approx(1.012)
    assert shaper.release_at(2.0, 500) == pytest.approx(2.0105)


def test_stalls() -> None:
    shaper = Shaper(LinkSettings(delay_ms=1, stall_every_s=2.0, stall_ms=300), 10.0, 0)
    assert shaper.release_at(10.1, 1) == pytest.approx(10.101)  # the first comes after two seconds
    assert shaper.release_at(12.1, 1) == pytest.approx(12.3)
    assert shaper.release_at(12.2, 1) == pytest.approx(12.3)
    assert shaper.release_at(12.35, 1) == pytest.approx(12.351)
    assert shaper.release_at(13.9995, 1) == pytest.approx(14.3)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"delay_ms": -1}, "delay_ms"),
        ({"delay_ms": "5"}, "delay_ms"),
        ({"stall_ms": 50}, "stall_ms"),
        ({"stall_ms": 1000, "stall_every_s": 1}, "stall_ms"),
        ({"latency": 5}, "latency"),
        ({"jitter_ms": json.loads("NaN")}, "jitter_ms"),
    ],
)
def test_bad_settings_name_the_setting(values: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        LinkSettings.from_dict(values)
    assert caught.value.field == field
