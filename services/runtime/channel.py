"""gRPC channel and server options: the one place where they are written.

Responsible for: message caps, keepalive with ping timeout, matching server ping limits, TLS credentials and
opening channels. Deliberately does not know: services, deadlines or retries; callers set a deadline on every
call.

A frozen peer is detected within about keepalive time plus ping timeout; without the ping timeout gRPC takes a
minute.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc import aio

from paceline.contract.errors import InvalidRequestError
from paceline.contract.limits import (
    KEEPALIVE_TIME_MS,
    KEEPALIVE_TIMEOUT_MS,
    MAX_MESSAGE_BYTES,
    PING_TIMEOUT_MS,
)
from services.runtime.tls import Tls

Options = list[tuple[str, int | str]]


_BOTH_ENDS: Options = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
]


def channel_options() -> Options:
    """Options of every client channel."""
    return [
        *_BOTH_ENDS,
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]


def server_options() -> Options:
    """Options of every server. The port is not shared: a second process on it fails to bind."""
    return [
        *_BOTH_ENDS,
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
        ("grpc.so_reuseport", 0),
    ]


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Split ``host:port`` (or ``[v6]:port``).

    Raises:
        InvalidRequestError: no host, or no port from 1 to 65535.
    """
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidRequestError("endpoint", f"expected host:port, got {endpoint!r}")
    return host.strip("[]"), int(port)


def open_channel(endpoint: str, tls: Tls | None = None) -> aio.Channel:
    """Open a channel to ``host:port``. It connects on first use, and reconnects by itself.

    Raises:
        InvalidRequestError: the endpoint is not ``host:port``.
    """
    split_endpoint(endpoint)
    options: list[tuple[str, int | str]] = channel_options()
    if tls is None or tls.ca is None:
        return aio.insecure_channel(endpoint, options=options)
    if tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    credentials = grpc.ssl_channel_credentials(
        root_certificates=tls.ca.read_bytes(),
        private_key=tls.key.read_bytes() if tls.key is not None else None,
        certificate_chain=tls.cert.read_bytes() if tls.cert is not None else None,
    )
    return aio.secure_channel(endpoint, credentials, options=options)


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Server credentials that follow the files: after a rotation the next handshake uses the new certificate."""
    if tls.cert is None or tls.key is None:
        raise InvalidRequestError("tls", "a server needs a certificate and its key")
    files: Sequence[Path] = [path for path in (tls.cert, tls.key, tls.ca) if path is not None]
    stamp = _stamp(files)

    def read() -> grpc.ServerCertificateConfiguration:
        assert tls.cert is not None
        assert tls.key is not None
        return grpc.ssl_server_certificate_configuration(
            [(tls.key.read_bytes(), tls.cert.read_bytes())],
            root_certificates=tls.ca.read_bytes() if tls.ca is not None else None,
        )

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal stamp
        try:
            now = _stamp(files)
            if now == stamp:
                return None
            configuration = read()
        except OSError:  # in the middle of a rotation: keep the present certificate
            return None
        stamp = now
        return configuration

    return grpc.dynamic_ssl_server_credentials(
        read(),
        fetch,  # type: ignore[arg-type]  # None means no change; the stubs leave it out
        require_client_authentication=tls.ca is not None,
    )


def _stamp(files: Sequence[Path]) -> tuple[tuple[int, int], ...]:
    return tuple((stat.st_mtime_ns, stat.st_ino) for stat in (path.stat() for path in files))
