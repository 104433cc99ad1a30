"""ConductorService at the wire: checks a request, starts it in the lifecycle, and streams its output queue.

Knows gRPC and nothing of peers. Every admitted request ends in exactly one frame with a finish reason. A request that
fails before its first token ends in an error status instead.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import structlog

from orchestrator.placement import DrafterRequirement
from orchestrator.sequence_lifecycle import SequenceLifecycle
from orchestrator.sequences import Sequence
from paceline.contract import limits
from paceline.contract.errors import CapacityError, InvalidRequestError
from paceline.contract.fields import (
    check_integer,
    check_length,
    check_new_tokens,
    check_prompt,
    check_stop_token_ids,
    check_tenant,
)
from paceline.v1 import orchestrator_pb2, orchestrator_pb2_grpc, peer_pb2, sampling_pb2
from services.runtime.sampling import check_speculation, log_prob_counts, sampling_params

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
        """Stream one request's tokens, then its end."""
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
            raise InvalidRequestError("speculation.drafter", f"there is no drafter{name}")
        if requirement.reads_features is not None and not self._may_have_drafter(requirement):
            what = "reads" if requirement.reads_features else "drafts without"
            raise InvalidRequestError(
                "speculation.reads_features", f"no drafter{name} {what} the target's features"
            )


def check_run(request: orchestrator_pb2.RunRequest, verifier: peer_pb2.PeerInfo | None) -> int:
    """Check every field of a request again; return its most draft nodes.

    Args:
        request: as sent by a gateway.
        verifier: its limits apply; None where it has not been reached yet.

    Raises:
        InvalidRequestError: naming the field.
    """
    vocab_size = limits.MAX_TOKEN_ID if verifier is None else verifier.vocab_size
    max_positions = limits.MAX_POSITIONS if verifier is None else verifier.max_positions
    num_tokens = len(request.prompt_token_ids)
    check_length("request_id", request.request_id, 1, limits.MAX_REQUEST_ID_CHARACTERS)
    check_prompt("prompt_token_ids", request.prompt_token_ids, vocab_size, max_positions)
    check_tenant("tenant", request.tenant)
    check_new_tokens(request.max_new_tokens, request.num_resumed_tokens, num_tokens, max_positions)
    num_positions = num_tokens - request.num_resumed_tokens + request.max_new_tokens
    if num_positions > max_positions:
        raise InvalidRequestError(
            "max_new_tokens", f"asks for {num_positions} positions, the model has {max_positions}"
        )
    check_stop_token_ids("stop_token_ids", request.stop_token_ids, vocab_size)
    if not request.sampling.HasField("seed") or request.sampling.mode == sampling_pb2.VERIFY_MODE_UNSPECIFIED:
        raise InvalidRequestError("sampling", "must have a seed and a mode")
    sampling_params(request.sampling, vocab_size)
    log_prob_counts(request.log_probs, vocab_size)
    check_integer("stream_interval", request.stream_interval, 0, limits.MAX_STREAM_INTERVAL)
    check_speculation(request.speculation)
    if request.speculation.disabled:
        return 0
    if not request.speculation.HasField("max_draft_tokens"):
        return limits.MAX_DRAFT_NODES
    return int(request.speculation.max_draft_tokens)


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
