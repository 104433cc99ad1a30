"""Channel options of the clients.

Responsible for: message caps, keepalive that notices a dead server, and TLS. Deliberately does not know: calls.
Called by the two clients.
"""

from __future__ import annotations

from dataclasses import dataclass

import grpc

# A frozen server is noticed after about keepalive time plus ping timeout; servers accept one ping in 5 s.
OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
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
        key: of the client, where the server asks who is calling.
        cert: of the client.
    """

    ca: bytes | None = None
    key: bytes | None = None
    cert: bytes | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """For opening a channel."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)
