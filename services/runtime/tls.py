"""The TLS files of a process. Knows no gRPC, so that the command line can name them without loading it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files of a process.

    Attributes:
        cert: certificate chain; needed to serve, and by a client that proves who it is.
        key: private key of ``cert``.
        ca: authorities; a server with one demands client certificates, a client checks the server against it.
        server_name: name expected in the server's certificate, where it is not the host of the endpoint.
    """

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None
    server_name: str | None = None
