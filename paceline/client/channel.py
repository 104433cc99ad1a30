"""Channel options of the clients.

Responsible for: message caps, keepalive that detects a dead server, and TLS. Deliberately does not know: calls.
Called by the two clients.
"""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from paceline.contract.limits import (
    KEEPALIVE_TIME_MS,
    KEEPALIVE_TIMEOUT_MS,
    MAX_MESSAGE_BYTES,
    PING_TIMEOUT_MS,
)

# A frozen server is detected after about keepalive time plus ping timeout; servers accept one ping in 5 s.
OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_retries", 0),  # this library retries, and no other layer
]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Contents of PEM files.

    Attributes:
        ca: authorities that signed the server's certificate; None takes the system's.
        key: the client's key, for a server that demands client certificates.
        cert: the client's certificate.
    """

    ca: bytes | None = None
    key: bytes | None = None
    cert: bytes | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """For opening a channel."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)
