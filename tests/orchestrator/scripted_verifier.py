"""A scripted verifier: it verifies drafts against the scripted text, and misbehaves as a test says."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from paceline.v1 import peer_pb2, sampling_pb2, target_pb2, target_pb2_grpc
from tests.orchestrator.scripted_peers import (
    Server,
    log_probs_of,
    next_token,
    peer_info,
)

STEP_PAUSE_S = 0.001


@dataclass
class Running:
    """A sequence at the scripted verifier."""

    sequence_id: int
    epoch: int
    text: list[int]
    num_left: int
    stop_token_ids: frozenset[int]
    max_draft_nodes: int
    log_probs: sampling_pb2.LogProbOptions
    prompt: list[int]  # whose log-probabilities are wanted and not yet sent, from its first token on
    prompt_start: int = 1
    drafts: dict[int, list[int]] = field(default_factory=dict)  # start -> tokens of a chain


class ScriptedVerifier(Server, target_pb2_grpc.TargetServiceServicer):
    """Commits one token per step and whatever agreeing draft has arrived."""

    def __init__(self, **info: Any) -> None:
        super().__init__()
        self.info = peer_info("verifier", **info)
        self.info_changes = info
        self.running: dict[int, Running] = {}
        self.opens: list[target_pb2.OpenSequence] = []
        self.closed: list[int] = []
        self.attaches: list[target_pb2.AttachFeatures] = []
        self.policies: list[peer_pb2.StepPolicy] = []
        self.hellos: list[peer_pb2.StreamHello] = []
        self.num_frames = 0
        self.num_steps = 0
        self.num_drafts = 0
        self.refusal: peer_pb2.SequenceFailure | None = None
        self.is_paused = False
        self.max_tokens_before_break: int | None = None
        self.waits_for_drafts = False
        self.has_hits = False
        self.prompt_chunk = 1 << 30
        self.has_log_probs = True
        self._ids = itertools.count(1)

    def add_to(self, server: grpc.aio.Server) -> None:
        target_pb2_grpc.add_TargetServiceServicer_to_server(self, server)

    async def restart(self) -> None:
        """Comes back as another instance that knows nothing."""
        await self.stop()
        self.info = peer_info("verifier", **self.info_changes)
        self.running.clear()
        self._ids = itertools.count(1)  # ids of another instance may repeat
        await self.start()

    async def Describe(self, request: Any, context: Any) -> target_pb2.TargetServiceDescribeResponse:
        return target_pb2.TargetServiceDescribeResponse(info=self.info)

    async def Verify(
        self, request_iterator: AsyncIterator[target_pb2.VerifyRequest], context: Any
    ) -> AsyncIterator[target_pb2.VerifyResponse]:
        first = await anext(request_iterator)
        self.hellos.append(first.hello)
        self.running.clear()
        out: asyncio.Queue[target_pb2.VerifyResponse] = asyncio.Queue()
        out.put_nowait(target_pb2.VerifyResponse(hello=self.info))

        async def read() -> None:
            async for frame in request_iterator:
                self._take(frame, out)

        async def step() -> None:
            for index in itertools.count(1):
                await asyncio.sleep(STEP_PAUSE_S)
                if self.running and not self.is_paused:
                    self.num_steps += 1
                    out.put_nowait(target_pb2.VerifyResponse(step=self._step(index)))

        tasks = [asyncio.create_task(read()), asyncio.create_task(step())]
        try:
            while True:
                yield await out.get()
                if self.max_tokens_before_break is not None and self.max_tokens_before_break <= 0:
                    self.max_tokens_before_break = None
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "scripted break")
        finally:
            for task in tasks:
                task.cancel()
            self.running.clear()

    def _take(self, frame: target_pb2.VerifyRequest, out: asyncio.Queue[target_pb2.VerifyResponse]) -> None:
        self.num_frames += 1
        for opening in frame.opens:
            self.opens.append(opening)
            if self.refusal is not None:
                refusal = peer_pb2.SequenceFailure()
                refusal.CopyFrom(self.refusal)
                refusal.key = opening.key
                out.put_nowait(target_pb2.VerifyResponse(failures=[refusal]))
                continue
            sequence = Running(
                next(self._ids),
                opening.epoch,
                list(opening.prompt_token_ids),
                opening.max_new_tokens - opening.num_resumed_tokens,
                frozenset(opening.stop_token_ids),
                opening.max_draft_nodes,
                opening.log_probs,
                list(opening.prompt_token_ids)[: len(opening.prompt_token_ids) - opening.num_resumed_tokens],
            )
            self.running[sequence.sequence_id] = sequence
            opened = target_pb2.SequenceOpened(
                key=opening.key, sequence_id=sequence.sequence_id, epoch=opening.epoch
            )
            out.put_nowait(target_pb2.VerifyResponse(opened=[opened]))
        for sequence_id in frame.closes:
            self.closed.append(sequence_id)
            self.running.pop(sequence_id, None)
        self.attaches.extend(frame.attaches)
        if frame.HasField("policy"):
            self.policies.append(frame.policy)
        offset = 0
        for sequence_id, epoch, start, size in zip(
            frame.drafts.sequence_ids,
            frame.drafts.epochs,
            frame.drafts.starts,
            frame.drafts.sizes,
            strict=True,
        ):
            tokens = list(frame.drafts.tokens[offset : offset + size])
            offset += size
            sequence = self.running.get(sequence_id)
            if sequence is not None and sequence.epoch == epoch:
                self.num_drafts += 1
                sequence.drafts[start] = tokens

    def _step(self, index: int) -> target_pb2.StepReport:
        report = target_pb2.StepReport(
            step_index=index, num_rows=1, num_sequences=len(self.running), step_us=1000
        )
        for sequence in list(self.running.values()):
            start = len(sequence.text)
            said = report.log_probs.add(sequence_id=sequence.sequence_id)
            if sequence.log_probs.HasField("num_prompt_top") and sequence.prompt_start < len(sequence.prompt):
                stop = sequence.prompt_start + self.prompt_chunk
                span = sequence.prompt[sequence.prompt_start : stop]
                said.prompt.CopyFrom(log_probs_of(span, sequence.log_probs.num_prompt_top))
                said.prompt_start = sequence.prompt_start
                sequence.prompt_start += len(span)
                if self.max_tokens_before_break is not None:
                    self.max_tokens_before_break -= len(span)
                if sequence.prompt_start < len(sequence.prompt):
                    continue
            draft = sequence.drafts.pop(start, [])[: sequence.max_draft_nodes]
            if self.waits_for_drafts and not draft and sequence.max_draft_nodes:
                continue
            accepted = 0
            tokens: list[int] = []
            while True:
                tokens.append(next_token(sequence.text))
                sequence.text.append(tokens[-1])
                sequence.num_left -= 1
                is_over = sequence.num_left == 0 or tokens[-1] in sequence.stop_token_ids
                if is_over or accepted >= len(draft) or draft[accepted] != tokens[-1]:
                    break
                accepted += 1
            if self.max_tokens_before_break is not None:
                self.max_tokens_before_break -= len(tokens)
            reason = sampling_pb2.FINISH_REASON_UNSPECIFIED
            if is_over:
                stopped = tokens[-1] in sequence.stop_token_ids
                reason = sampling_pb2.FINISH_REASON_STOP if stopped else sampling_pb2.FINISH_REASON_LENGTH
                del self.running[sequence.sequence_id]
            if sequence.log_probs.HasField("num_top") and self.has_log_probs:
                said.committed.CopyFrom(log_probs_of(tokens, sequence.log_probs.num_top))
            report.commits.sequence_ids.append(sequence.sequence_id)
            report.commits.epochs.append(sequence.epoch)
            report.commits.starts.append(start)
            report.commits.sizes.append(len(tokens))
            report.commits.tokens.extend(tokens)
            report.num_draft_tokens.append(len(draft))
            report.draft_depths.append(len(draft))
            report.num_accepted_tokens.append(accepted)
            report.finish_reasons.append(reason)
            report.cache_hits.append(int(self.has_hits))
        return report
