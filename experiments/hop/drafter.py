"""A drafter process whose drafts take no time: what is left is what the way to it takes.

The service around it is the real one. `python -m experiments.hop.drafter PORT` ends with its standard input.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence

import uvloop

from paceline import PROTOCOL_VERSION
from paceline.drafts import DraftEntry
from paceline.methods.drafter import DraftRequest, OutcomeRequest
from paceline.target import TapSpec
from paceline.v1 import peer_pb2
from services.drafter.host import DrafterHost
from services.drafter.settings import DrafterSettings
from services.runtime.process import Process

VOCAB_SIZE = 1000
MAX_POSITIONS = 1 << 20


def identity(role: str) -> peer_pb2.PeerInfo:
    """Who the peers of this experiment say they are."""
    return peer_pb2.PeerInfo(
        protocol_version=PROTOCOL_VERSION,
        instance_id=role,
        model_fingerprint="0" * 64,
        tokenizer_fingerprint="0" * 64,
        vocab_size=VOCAB_SIZE,
        max_positions=MAX_POSITIONS,
        dtype="float32",
        method="instant" if role == "drafter" else "",
        model_name="hop",
    )


class InstantDrafter:
    """Drafts the same tokens for everybody, at once; see `paceline.methods.drafter.Drafter`."""

    method = "instant"
    tap: TapSpec | None = None
    max_positions = MAX_POSITIONS
    longest_draft: int | None = None

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}

    def open(self, sequence_id: int, tokens: Sequence[int]) -> None:
        """Start following a sequence."""
        self._lengths[sequence_id] = len(tokens)

    def extend(self, sequence_id: int, start: int, tokens: Sequence[int]) -> None:
        """Take in committed tokens."""
        self._lengths[sequence_id] = start + len(tokens)

    def feed(self, sequence_id: int, start: int, features: object) -> None:
        """Features are not read."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftEntry | None]:
        """As many tokens as were asked for."""
        return [
            DraftEntry.chain(
                self._lengths[request.sequence_id],
                tuple(range(request.num_tokens)),
                (-0.5,) * request.num_tokens,
            )
            for request in requests
        ]

    def draft_outcomes(
        self, requests: Sequence[OutcomeRequest], may_continue: Callable[[], bool] = lambda: True
    ) -> list[DraftEntry | None]:
        """None."""
        return [None for _ in requests]

    def close(self, sequence_id: int) -> None:
        """Forget a sequence."""
        self._lengths.pop(sequence_id, None)


async def main() -> None:
    """Serve until standard input ends."""
    settings = DrafterSettings.model_validate(
        {"port": int(sys.argv[1]), "metrics_port": None, "drafter": "-", "model": "-"}
    )
    process = Process("drafter", settings)
    await DrafterHost(settings, InstantDrafter(), identity("drafter")).attach(process)
    await process.start()
    sys.stdout.write(f"ready {process.port}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await process.shutdown(0.0)


if __name__ == "__main__":
    uvloop.run(main())
