"""What the scripted peers share: a text, an identity, a server.

Scripted peers speak the real protocol over real sockets, without a model. Their text is a pure function of its prefix,
so every test can say what must come out. They stand in for peers only in tests of the conductor's own behaviour; the
real processes are tested together in tests/integration.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import grpc

from paceline import PROTOCOL_VERSION
from paceline.v1 import peer_pb2, sampling_pb2
from services.runtime.channel import server_options

VOCAB_SIZE = 997


_instances = itertools.count(1)


def next_token(tokens: Sequence[int]) -> int:
    """The one continuation of a text."""
    return (31 * tokens[-1] + 7 * len(tokens) + 3) % VOCAB_SIZE


def continuation(tokens: Sequence[int], num_tokens: int) -> list[int]:
    """The next tokens of a text."""
    text = list(tokens)
    for _ in range(num_tokens):
        text.append(next_token(text))
    return text[len(tokens) :]


def log_probs_of(tokens: Sequence[int], num_top: int) -> sampling_pb2.LogProbs:
    """What the scripted verifier says of tokens: numbers that tell which token they are of."""
    return sampling_pb2.LogProbs(
        log_probs=[-float(token) for token in tokens],
        ranks=[token + 1 for token in tokens],
        num_top=num_top,
        top_token_ids=[(token + place) % VOCAB_SIZE for token in tokens for place in range(num_top)],
        top_log_probs=[-float(place) for _ in tokens for place in range(num_top)],
    )


def peer_info(role: str, **changes: Any) -> peer_pb2.PeerInfo:
    """An identity; all scripted peers belong to the same target."""
    fields: dict[str, Any] = {
        "protocol_version": PROTOCOL_VERSION,
        "instance_id": f"{role}-{next(_instances)}",
        "model_fingerprint": "f" * 64,
        "tokenizer_fingerprint": "e" * 64,
        "vocab_size": VOCAB_SIZE,
        "max_positions": 4096,
        "dtype": "float32",
        "method": "scripted" if role == "drafter" else "",
        "model_name": "scripted",
    }
    return peer_pb2.PeerInfo(**(fields | changes))


class Server:
    """A gRPC server that can be stopped and started again on the same port."""

    def __init__(self) -> None:
        self.port = 0
        self._server: grpc.aio.Server | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def add_to(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError

    async def start(self) -> None:
        self._server = grpc.aio.server(options=server_options())
        self.add_to(self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(None)
