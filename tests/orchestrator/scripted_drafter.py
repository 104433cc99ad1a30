"""A scripted drafter: it drafts the scripted text, and misbehaves as a test says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc

from paceline.v1 import drafter_pb2, drafter_pb2_grpc, peer_pb2
from tests.orchestrator.scripted_peers import (
    VOCAB_SIZE,
    Server,
    continuation,
    peer_info,
)


@dataclass
class Drafted:
    """A sequence at the scripted drafter."""

    epoch: int
    text: list[int]


class ScriptedDrafter(Server, drafter_pb2_grpc.DrafterServiceServicer):
    """Drafts the scripted text, unless a test sets it otherwise."""

    def __init__(self, **info: Any) -> None:
        super().__init__()
        self.info = peer_info("drafter", **info)
        self.info_changes = info
        self.open: dict[int, Drafted] = {}
        self.opens: list[drafter_pb2.OpenDraftSequence] = []
        self.plans: list[peer_pb2.StepPolicy] = []
        self.num_commits = 0
        self.num_gaps = 0
        self.is_silent = False
        self.is_wrong = False
        self.is_stale = False  # names an epoch that is not in force
        self.failure_reason = ""
        self.length = 4

    def add_to(self, server: grpc.aio.Server) -> None:
        drafter_pb2_grpc.add_DrafterServiceServicer_to_server(self, server)

    async def restart(self) -> None:
        """Comes back as another instance that knows nothing."""
        await self.stop()
        self.info = peer_info("drafter", **self.info_changes)
        await self.start()

    async def Describe(self, request: Any, context: Any) -> drafter_pb2.DrafterServiceDescribeResponse:
        return drafter_pb2.DrafterServiceDescribeResponse(info=self.info)

    async def Draft(
        self, request_iterator: AsyncIterator[drafter_pb2.DraftRequest], context: Any
    ) -> AsyncIterator[drafter_pb2.DraftResponse]:
        await anext(request_iterator)
        self.open.clear()
        yield drafter_pb2.DraftResponse(hello=self.info)
        try:
            async for frame in request_iterator:
                answer = self._answer(frame)
                if not self.is_silent:
                    yield answer
        finally:
            self.open.clear()

    def _answer(self, frame: drafter_pb2.DraftRequest) -> drafter_pb2.DraftResponse:
        answer = drafter_pb2.DraftResponse(frame_id=frame.frame_id)
        if frame.HasField("policy"):
            self.plans.append(frame.policy)
            self.length = frame.policy.draft_length
        for sequence_id in frame.closes:
            self.open.pop(sequence_id, None)
        for opening in frame.opens:
            self.opens.append(opening)
            if self.failure_reason:
                answer.failures.add(sequence_id=opening.sequence_id, reason=self.failure_reason, code=8)
                continue
            self.open[opening.sequence_id] = Drafted(opening.epoch, list(opening.token_ids))
            self._draft(answer, opening.sequence_id)
        offset = 0
        for sequence_id, epoch, start, size in zip(
            frame.commits.sequence_ids,
            frame.commits.epochs,
            frame.commits.starts,
            frame.commits.sizes,
            strict=True,
        ):
            tokens = list(frame.commits.tokens[offset : offset + size])
            offset += size
            drafted = self.open.get(sequence_id)
            if drafted is None or drafted.epoch != epoch:
                continue
            self.num_commits += 1
            self.num_gaps += start != len(drafted.text)
            drafted.text[start:] = tokens
            self._draft(answer, sequence_id)
        return answer

    def _draft(self, answer: drafter_pb2.DraftResponse, sequence_id: int) -> None:
        drafted = self.open[sequence_id]
        tokens = continuation(drafted.text, self.length)
        if self.is_wrong:
            tokens = [(token + 1) % VOCAB_SIZE for token in tokens]
        if tokens:
            answer.num_sequences += 1
            answer.num_draft_steps = len(tokens)
            answer.drafts.sequence_ids.append(sequence_id)
            answer.drafts.epochs.append(drafted.epoch - (1 if self.is_stale else 0))
            answer.drafts.starts.append(len(drafted.text))
            answer.drafts.sizes.append(len(tokens))
            answer.drafts.tokens.extend(tokens)
            answer.drafts.parents.extend(range(-1, len(tokens) - 1))
