"""A drafter without a model, and a verifier's feature stream without a target, for tests of the drafter process itself.

The drafter's text is a pure function of its prefix. Where it is given a tap, it checks that what it is fed are the
features of the very tokens it was told: row t of a sequence must read [t, t + 1, ...].
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import torch
from torch import Tensor

from paceline.drafts import DraftEntry
from paceline.methods.drafter import DraftRequest, OutcomeRequest
from paceline.target import TapSpec
from paceline.v1 import peer_pb2, target_pb2, target_pb2_grpc
from services.runtime import feature_parts, tensors
from services.runtime.channel import server_options

VOCAB_SIZE = 97
WIDTH = 4


def continuation(tokens: Sequence[int], num_tokens: int) -> list[int]:
    """The next tokens of a text."""
    text = list(tokens)
    for _ in range(num_tokens):
        text.append((7 * text[-1] + 3 * len(text) + 1) % VOCAB_SIZE)
    return text[len(tokens) :]


def feature_rows(start: int, num_rows: int) -> Tensor:
    """Features of positions from `start` on, [num_rows, WIDTH]."""
    positions = torch.arange(start, start + num_rows, dtype=torch.float32)
    return positions[:, None] + torch.arange(WIDTH, dtype=torch.float32)[None, :]


class ScriptedDrafter:
    """Follows the Drafter protocol."""

    method = "scripted"

    def __init__(self, tap: TapSpec | None = None, max_positions: int = 200) -> None:
        self.tap = tap
        self.max_positions = max_positions
        self.longest_draft: int | None = None
        self.texts: dict[int, list[int]] = {}
        self.num_fed: dict[int, int] = {}
        self.batches: list[list[DraftRequest]] = []
        self.broken_prompts: set[int] = set()  # first tokens of sequences on which drafting raises
        self.silent_after: set[int] = set()  # last tokens of texts that it has nothing to say of
        self.outcome_batches: list[list[OutcomeRequest]] = []
        self.broken_outcomes: set[int] = set()
        self.may_finish_outcomes = (
            threading.Event()
        )  # until then they are drafted for as long as it may go on
        self.may_finish_outcomes.set()
        self.may_draft = threading.Event()
        self.may_draft.set()

    def open(self, sequence_id: int, tokens: Sequence[int]) -> None:
        assert sequence_id not in self.texts
        self.texts[sequence_id] = list(tokens)
        self.num_fed[sequence_id] = 0

    def extend(self, sequence_id: int, start: int, tokens: Sequence[int]) -> None:
        assert start == len(self.texts[sequence_id])
        self.texts[sequence_id].extend(tokens)

    def feed(self, sequence_id: int, start: int, features: Tensor) -> None:
        assert self.tap is not None
        known = self.num_fed[sequence_id]
        assert start >= known if self.tap.last_only else start == known
        assert torch.equal(features, feature_rows(start, len(features)))
        self.num_fed[sequence_id] = start + len(features)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftEntry | None]:
        assert self.may_draft.wait(20)
        self.batches.append(list(requests))
        entries: list[DraftEntry | None] = []
        for request in requests:
            text = self.texts[request.sequence_id]
            if text[0] in self.broken_prompts:
                raise ValueError("scripted failure")
            if text[-1] in self.silent_after:
                entries.append(None)
                continue
            num_fed = self.num_fed[request.sequence_id]
            is_ahead = self.tap is not None and self.tap.last_only and num_fed >= len(text)
            if self.tap is not None and request.reads_features and (num_fed < len(text) - 1 or is_ahead):
                entries.append(None)
                continue
            tokens = continuation(text, request.num_tokens)
            entries.append(DraftEntry.chain(len(text), tuple(tokens), tuple([-0.5] * len(tokens))))
        return entries

    def draft_outcomes(
        self, requests: Sequence[OutcomeRequest], may_continue: Callable[[], bool] = lambda: True
    ) -> list[DraftEntry | None]:
        """Outcome i of a text is the first i tokens of its continuation and a wrong one; what follows goes on there."""
        self.outcome_batches.append(list(requests))
        while not self.may_finish_outcomes.wait(0.001):
            if not may_continue():
                return [None] * len(requests)
        entries: list[DraftEntry | None] = []
        for request in requests:
            text = self.texts[request.sequence_id]
            if text[0] in self.broken_outcomes:
                raise ValueError("scripted failure")
            tokens: list[int] = []
            parents: list[int] = []
            for outcome in range(request.max_outcomes)[request.partition :: request.num_partitions]:
                path = continuation(text, outcome)
                path.append((continuation([*text, *path], 1)[0] + 1) % VOCAB_SIZE)
                path += continuation([*text, *path], request.num_tokens)
                parents += [-1, *range(len(tokens), len(tokens) + len(path) - 1)]
                tokens += path
            entries.append(DraftEntry(len(text), tuple(tokens), tuple(parents), tuple([-0.5] * len(tokens))))
        return entries

    def close(self, sequence_id: int) -> None:
        self.texts.pop(sequence_id, None)
        self.num_fed.pop(sequence_id, None)


class ScriptedFeatures(target_pb2_grpc.TargetServiceServicer):
    """The part of a verifier that a drafter talks to."""

    def __init__(self, info: peer_pb2.PeerInfo) -> None:
        self.info = info
        self.requests: list[target_pb2.StreamFeaturesRequest] = []
        self.port = 0
        self._streams: list[asyncio.Queue[target_pb2.StreamFeaturesResponse | None]] = []
        self._server: grpc.aio.Server | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    async def start(self) -> None:
        self._server = grpc.aio.server(options=server_options())
        target_pb2_grpc.add_TargetServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(None)

    async def restart(self, instance_id: str) -> None:
        await self.stop()
        self.info.instance_id = instance_id
        await self.start()

    async def Describe(self, request: Any, context: Any) -> target_pb2.TargetServiceDescribeResponse:
        return target_pb2.TargetServiceDescribeResponse(info=self.info)

    async def StreamFeatures(
        self, request: target_pb2.StreamFeaturesRequest, context: Any
    ) -> AsyncIterator[target_pb2.StreamFeaturesResponse]:
        self.requests.append(request)
        stream: asyncio.Queue[target_pb2.StreamFeaturesResponse | None] = asyncio.Queue()
        self._streams.append(stream)
        try:
            while (chunk := await stream.get()) is not None:
                yield chunk
        finally:
            self._streams.remove(stream)

    def push(
        self,
        sequence_id: int,
        start: int,
        num_rows: int,
        rows: Tensor | None = None,
        epoch: int = 0,
        tokens: Sequence[int] = (),
    ) -> None:
        """Pushes features of positions from `start` on, what is read of the newest alone cut to those, and the tokens
        committed with them."""
        parts = feature_parts.tap_parts(self.info.tap)
        whole, recent = feature_parts.cut(feature_rows(start, num_rows) if rows is None else rows, parts)
        for stream in self._streams:
            stream.put_nowait(
                target_pb2.StreamFeaturesResponse(
                    sequence_id=sequence_id,
                    epoch=epoch,
                    start=start,
                    features=tensors.encode(whole),
                    tokens=tokens,
                    recent=[tensors.encode(part) for part in recent],
                )
            )

    def break_streams(self) -> None:
        """Ends all streams."""
        for stream in self._streams:
            stream.put_nowait(None)
