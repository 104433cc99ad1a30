"""Checks an OpenSequence from the wire and turns it into a SequenceSpec.

Every id and count is compared with the model's limits here, before anything indexes a tensor with it.
"""

from __future__ import annotations

from paceline.errors import InvalidRequestError
from paceline.v1 import target_pb2
from services.runtime.sampling import sampling_params
from services.verifier.sequence import SequenceSpec

MAX_STOP_TOKENS = 64
MAX_DRAFT_NODES = 1024


def sequence_spec(opening: target_pb2.OpenSequence, vocab_size: int, max_positions: int) -> SequenceSpec:
    """A checked specification.

    Raises:
        InvalidRequestError: naming the field that is out of range.
    """
    prompt = tuple(opening.prompt_token_ids)
    if opening.key == 0:
        raise InvalidRequestError("key", "must be above 0")
    if not prompt:
        raise InvalidRequestError("prompt_token_ids", "must not be empty")
    if len(prompt) >= max_positions:
        raise InvalidRequestError(
            "prompt_token_ids", f"has {len(prompt)} tokens, at most {max_positions - 1} fit"
        )
    if max(prompt) >= vocab_size:
        raise InvalidRequestError("prompt_token_ids", f"token id {max(prompt)} is not below {vocab_size}")
    if opening.num_resumed_tokens >= len(prompt):
        raise InvalidRequestError("num_resumed_tokens", "must be smaller than the prompt")
    if not opening.num_resumed_tokens < opening.max_new_tokens <= max_positions:
        raise InvalidRequestError("max_new_tokens", f"must be between 1 and {max_positions} and not used up")
    if len(opening.stop_token_ids) > MAX_STOP_TOKENS:
        raise InvalidRequestError("stop_token_ids", f"at most {MAX_STOP_TOKENS} are allowed")
    if opening.max_draft_nodes > MAX_DRAFT_NODES:
        raise InvalidRequestError("max_draft_nodes", f"must be at most {MAX_DRAFT_NODES}")
    return SequenceSpec(
        key=opening.key,
        epoch=opening.epoch,
        prompt=prompt,
        sampling=sampling_params(opening.sampling),
        max_new_tokens=opening.max_new_tokens - opening.num_resumed_tokens,
        stop_token_ids=frozenset(opening.stop_token_ids),
        max_draft_nodes=opening.max_draft_nodes,
        num_resumed_tokens=opening.num_resumed_tokens,
    )
