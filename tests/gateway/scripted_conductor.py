"""A director and conductor that stream a script over real sockets, for edge cases that real ones rarely show.

Tests of whole texts run against the real orchestrator (tests/integration).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
from grpc import aio

from paceline.v1 import generation_pb2, orchestrator_pb2, orchestrator_pb2_grpc, peer_pb2, sampling_pb2


def log_probs_of(tokens: Sequence[int], num_top: int) -> sampling_pb2.LogProbs:
    """What the scripted conductor says of tokens: numbers that tell which token they are of."""
    return sampling_pb2.LogProbs(
        log_probs=[-float(token) for token in tokens],
        ranks=[token + 1 for token in tokens],
        num_top=num_top,
        top_token_ids=[(token + place) % 300 for token in tokens for place in range(num_top)],
        top_log_probs=[-float(place) for _ in tokens for place in range(num_top)],
    )


@dataclass
class Script:
    """What a conductor does.

    Attributes:
        tokens: the whole text.
        frame_sizes: tokens per frame, the last one repeated.
        finish_reason: of the last frame; unspecified ends the stream without one.
        fail_first_run_after: abort the first run with UNAVAILABLE after this many frames.
        gives_up: end it with FINISH_REASON_ERROR instead, as a conductor does whose verifier is gone.
        hang_after: send nothing more after this many frames.
        admit_status: refuse admission with this status.
        stats_in_every_frame: whether figures come before the end.
        fail_seed: abort the run with this seed after its first frame.
        tokens_by_seed: other texts for some seeds.
    """

    tokens: Sequence[int] = ()
    frame_sizes: Sequence[int] = (1,)
    finish_reason: sampling_pb2.FinishReason = sampling_pb2.FINISH_REASON_LENGTH
    fail_first_run_after: int | None = None
    gives_up: bool = False
    hang_after: int | None = None
    admit_status: grpc.StatusCode | None = None
    stats_in_every_frame: bool = False
    fail_seed: int | None = None
    tokens_by_seed: dict[int, Sequence[int]] = field(default_factory=dict)

    def text(self, request: orchestrator_pb2.RunRequest) -> Sequence[int]:
        """The whole text of a run."""
        return self.tokens_by_seed.get(request.sampling.seed, self.tokens)


@dataclass
class ScriptedConductor(
    orchestrator_pb2_grpc.DirectorServiceServicer, orchestrator_pb2_grpc.ConductorServiceServicer
):
    """Both services in one server; remembers what it was asked."""

    script: Script = field(default_factory=Script)
    vocab_size: int = 300
    max_positions: int = 512
    eos_token_ids: tuple[int, ...] = (1,)
    endpoint: str = ""
    admissions: list[orchestrator_pb2.AdmitRequest] = field(default_factory=list)
    runs: list[orchestrator_pb2.RunRequest] = field(default_factory=list)
    remaining_s: list[float] = field(default_factory=list)
    num_cancelled: int = 0
    num_running: int = 0

    async def Admit(self, request, context):
        self.admissions.append(request)
        if self.script.admit_status is not None:
            await context.abort(self.script.admit_status, "scripted refusal")
        return orchestrator_pb2.AdmitResponse(
            request_id=f"request-{len(self.admissions)}", conductor_endpoint=self.endpoint
        )

    async def DescribeDeployment(self, request, context):
        verifier = peer_pb2.PeerInfo(
            vocab_size=self.vocab_size,
            max_positions=self.max_positions,
            model_name="tiny",
            model_fingerprint="f" * 64,
            eos_token_ids=self.eos_token_ids,
        )
        drafter = peer_pb2.PeerInfo(method="independent")
        return orchestrator_pb2.DescribeDeploymentResponse(
            verifier=verifier, drafters=[drafter], placement="separate"
        )

    async def Run(self, request, context) -> AsyncIterator[orchestrator_pb2.RunResponse]:
        self.runs.append(request)
        self.remaining_s.append(context.time_remaining())
        self.num_running += 1
        try:
            async for frame in self._frames(request, context):
                yield frame
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1

    async def _frames(self, request, context) -> AsyncIterator[orchestrator_pb2.RunResponse]:
        script, options = self.script, request.log_probs
        tokens = script.text(request)
        at, num_frames = request.num_resumed_tokens, 0
        if options.HasField("num_prompt_top"):
            for part in (request.prompt_token_ids[1:3], request.prompt_token_ids[3:]):
                yield orchestrator_pb2.RunResponse(
                    prompt_log_probs=log_probs_of(part, options.num_prompt_top)
                )
        while at < len(tokens):
            if num_frames and request.sampling.seed == script.fail_seed:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "scripted fault")
            if len(self.runs) == 1 and num_frames == script.fail_first_run_after:
                if script.gives_up:
                    yield orchestrator_pb2.RunResponse(finish_reason=sampling_pb2.FINISH_REASON_ERROR)
                    return
                await context.abort(grpc.StatusCode.UNAVAILABLE, "scripted death")
            if num_frames == script.hang_after:
                await asyncio.Event().wait()
            size = script.frame_sizes[min(num_frames, len(script.frame_sizes) - 1)]
            num_frames += 1
            frame = orchestrator_pb2.RunResponse(token_ids=tokens[at : at + size])
            if options.HasField("num_top"):
                frame.log_probs.CopyFrom(log_probs_of(tokens[at : at + size], options.num_top))
            at += size
            if script.stats_in_every_frame:
                frame.stats.CopyFrom(self._stats(num_frames))
            yield frame
        if script.finish_reason != sampling_pb2.FINISH_REASON_UNSPECIFIED:
            yield orchestrator_pb2.RunResponse(
                finish_reason=script.finish_reason, stats=self._stats(num_frames)
            )

    def _stats(self, num_passes: int) -> generation_pb2.GenerationStats:
        return generation_pb2.GenerationStats(
            num_generated_tokens=len(self.script.tokens),
            num_target_passes=num_passes,
            num_draft_tokens=4 * num_passes,
            num_accepted_tokens=2 * num_passes,
            drafted_per_position=[num_passes, num_passes],
            accepted_per_position=[num_passes, num_passes // 2],
            time_to_first_token_us=1000,
            decode_us=5000,
        )


@asynccontextmanager
async def scripted_orchestrator(script: Script, **fields) -> AsyncIterator[ScriptedConductor]:
    """Serves a scripted director and conductor on a free loopback port."""
    conductor = ScriptedConductor(script, **fields)
    server = aio.server()
    orchestrator_pb2_grpc.add_DirectorServiceServicer_to_server(conductor, server)
    orchestrator_pb2_grpc.add_ConductorServiceServicer_to_server(conductor, server)
    conductor.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield conductor
    finally:
        await server.stop(0)
