"""ConductorService at the wire: checks a request, starts it in the lifecycle, and streams what the output queue holds.

Knows gRPC and nothing of peers. Every request that is taken up ends in exactly one frame with a finish reason, or
in an error status where nothing was streamed yet.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import structlog

from orchestrator.placement import DrafterRequirement
from orchestrator.sequence_lifecycle import SequenceLifecycle
from orchestrator.sequences import MAX_DRAFT_NODES, Sequence
from paceline.contract.errors import CapacityError, InvalidRequestError
from paceline.sampling.params import MAX_TOKEN_ID
from paceline.v1 import orchestrator_pb2, orchestrator_pb2_grpc, peer_pb2, sampling_pb2
from services.runtime.sampling import check_log_probs, check_token_ids, sampling_params
from services.runtime.tenants import check_tenant

MAX_REQUEST_ID_BYTES = 64
MAX_DRAFTER_NAME = 256
MAX_STREAM_INTERVAL = 1024
MAX_STOP_TOKENS = 64

log = structlog.get_logger()


class ConductorServicer(orchestrator_pb2_grpc.ConductorServiceServicer):
    """Serves gateways."""

    def __init__(
        self,
        lifecycle: SequenceLifecycle,
        max_sequences: int,
        verifier: Callable[[], peer_pb2.PeerInfo | None],
        may_have_drafter: Callable[[DrafterRequirement], bool],
    ) -> None:
        self._lifecycle = lifecycle
        self._max_sequences = max_sequences
        self._verifier = verifier
        self._may_have_drafter = may_have_drafter

    async def Run(
        self, request: orchestrator_pb2.RunRequest, context: Any
    ) -> AsyncIterator[orchestrator_pb2.RunResponse]:
        """Streams one request's tokens, then its end."""
        max_draft_nodes = check_run(request, self._verifier())
        if max_draft_nodes:
            self._check_requirement(DrafterRequirement.read(request.speculation))
        if self._lifecycle.is_running(request.request_id):
            raise InvalidRequestError("request_id", f"{request.request_id} is running already")
        if self._lifecycle.num_running >= self._max_sequences:
            raise CapacityError(f"{self._max_sequences} requests are running")
        sequence = self._lifecycle.begin(request, max_draft_nodes)
        try:
            while True:
                output = await sequence.output_queue.take()
                ending = output.ending
                if ending is not None and ending.error is not None and not sequence.has_streamed:
                    raise ending.error
                # Figures with every frame: a reader that stops at a stop text never sees the last one.
                frame = orchestrator_pb2.RunResponse(
                    token_ids=output.tokens, stats=sequence.generation_stats()
                )
                if output.log_probs.log_probs:
                    frame.log_probs.CopyFrom(output.log_probs)
                if output.prompt_log_probs.log_probs:
                    frame.prompt_log_probs.CopyFrom(output.prompt_log_probs)
                if ending is not None:
                    frame.finish_reason = ending.finish_reason
                    _log_end(sequence, ending.finish_reason)
                yield frame
                if ending is not None:
                    return
        finally:
            self._lifecycle.end(sequence)

    def _check_requirement(self, requirement: DrafterRequirement) -> None:
        name = f" called {requirement.name[:64]!r}" if requirement.name else ""
        if requirement.name and not self._may_have_drafter(DrafterRequirement(requirement.name)):
            raise InvalidRequestError("speculation.drafter", f"no drafter is{name}")
        if requirement.reads_features is not None and not self._may_have_drafter(requirement):
            what = "reads" if requirement.reads_features else "drafts without"
            raise InvalidRequestError(
                "speculation.reads_features", f"no drafter{name} {what} the target's features"
            )


def check_run(request: orchestrator_pb2.RunRequest, verifier: peer_pb2.PeerInfo | None) -> int:
    """Checks every field again, as far as it can be known here; returns the most draft nodes.

    Raises:
        InvalidRequestError: naming the field.
    """
    if not request.request_id or len(request.request_id) > MAX_REQUEST_ID_BYTES:
        raise InvalidRequestError("request_id", f"must have 1 to {MAX_REQUEST_ID_BYTES} characters")
    num_tokens = len(request.prompt_token_ids)
    if num_tokens == 0:
        raise InvalidRequestError("prompt_token_ids", "must not be empty")
    if request.num_resumed_tokens >= num_tokens:
        raise InvalidRequestError("num_resumed_tokens", "must leave at least one token of the prompt")
    check_tenant("tenant", request.tenant)
    if request.max_new_tokens < 1:
        raise InvalidRequestError("max_new_tokens", "must be at least 1")
    if request.num_resumed_tokens >= request.max_new_tokens:
        raise InvalidRequestError("num_resumed_tokens", "must leave something to generate")
    if len(request.stop_token_ids) > MAX_STOP_TOKENS:
        raise InvalidRequestError("stop_token_ids", f"at most {MAX_STOP_TOKENS} are allowed")
    if not request.sampling.HasField("seed") or request.sampling.mode == sampling_pb2.VERIFY_MODE_UNSPECIFIED:
        raise InvalidRequestError("sampling", "seed and mode must be set")
    vocab_size = MAX_TOKEN_ID if verifier is None else verifier.vocab_size
    check_token_ids(sampling_params(request.sampling), vocab_size)
    check_log_probs(request.log_probs, vocab_size)
    if request.stop_token_ids and max(request.stop_token_ids) >= vocab_size:
        raise InvalidRequestError("stop_token_ids", f"must be below the vocabulary size {vocab_size}")
    if verifier is not None:
        if max(request.prompt_token_ids) >= verifier.vocab_size:
            raise InvalidRequestError(
                "prompt_token_ids", f"must be below the vocabulary size {verifier.vocab_size}"
            )
        num_positions = num_tokens - request.num_resumed_tokens + request.max_new_tokens
        if num_positions > verifier.max_positions:
            raise InvalidRequestError(
                "max_new_tokens",
                f"{num_positions} positions are asked for, the model has {verifier.max_positions}",
            )
    if request.stream_interval > MAX_STREAM_INTERVAL:
        raise InvalidRequestError("stream_interval", f"must be at most {MAX_STREAM_INTERVAL}")
    options = request.speculation
    if len(options.drafter) > MAX_DRAFTER_NAME:
        raise InvalidRequestError("speculation.drafter", f"must have at most {MAX_DRAFTER_NAME} characters")
    if options.disabled:
        return 0
    if not options.HasField("max_draft_tokens"):
        return MAX_DRAFT_NODES
    if not 1 <= options.max_draft_tokens <= MAX_DRAFT_NODES:
        raise InvalidRequestError("speculation.max_draft_tokens", f"must be between 1 and {MAX_DRAFT_NODES}")
    return int(options.max_draft_tokens)


def _log_end(sequence: Sequence, finish_reason: sampling_pb2.FinishReason) -> None:
    log.info(
        "request ended",
        request_id=sequence.request_id,
        finish_reason=sampling_pb2.FinishReason.Name(finish_reason),
        num_generated_tokens=sequence.commit_log.num_generated_tokens,
        num_target_passes=sequence.stats.num_passes,
        num_accepted_tokens=sequence.stats.num_accepted_tokens,
        num_resumes=sequence.num_resumes,
    )
