"""Scripted peers: a verifier and a drafter that speak the real protocol over real sockets, without a model.

The text they agree on is a pure function of its prefix, so that every test can say what must come out. What they do
wrong, and when, is set by the test. They stand in for peers only in tests of the conductor's own behaviour; the real
processes are tested together in tests/integration.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from paceline import PROTOCOL_VERSION
from paceline.v1 import drafter_pb2, drafter_pb2_grpc, peer_pb2, sampling_pb2, target_pb2, target_pb2_grpc
from services.runtime.channel import server_options

VOCAB_SIZE = 997
STEP_PAUSE_S = 0.001

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
        self.held_until_draft = False
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
            if self.held_until_draft and not draft and sequence.max_draft_nodes:
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


@dataclass
class Drafted:
    """A sequence at the scripted drafter."""

    epoch: int
    text: list[int]


class ScriptedDrafter(Server, drafter_pb2_grpc.DrafterServiceServicer):
    """Knows the text and drafts it, unless told otherwise."""

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
