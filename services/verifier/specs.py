"""Checks an OpenSequence from the wire and turns it into a SequenceSpec.

Every id and count is compared with the model's limits here, before anything indexes a tensor with it.
"""

from __future__ import annotations

from paceline.errors import InvalidRequestError
from paceline.sampling import ParameterError, SamplingParams, VerifyMode
from paceline.v1 import sampling_pb2, target_pb2
from services.verifier.sequence import SequenceSpec

MAX_STOP_TOKENS = 64
MAX_DRAFT_NODES = 1024

_MODES = {
    sampling_pb2.VERIFY_MODE_UNSPECIFIED: None,
    sampling_pb2.VERIFY_MODE_GREEDY: VerifyMode.GREEDY,
    sampling_pb2.VERIFY_MODE_COUPLED: VerifyMode.COUPLED,
    sampling_pb2.VERIFY_MODE_REJECTION: VerifyMode.REJECTION,
}


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
    )


def sampling_params(message: sampling_pb2.SamplingParams) -> SamplingParams:
    """Sampling parameters with the defaults of paceline.v1.SamplingParams.

    Raises:
        InvalidRequestError: naming the field that is out of range.
    """
    if message.mode not in _MODES:
        raise InvalidRequestError("sampling.mode", f"{message.mode} is not a verification mode")
    try:
        return SamplingParams(
            temperature=message.temperature if message.HasField("temperature") else 0.0,
            top_k=message.top_k,
            top_p=message.top_p if message.HasField("top_p") else 1.0,
            min_p=message.min_p,
            seed=message.seed,
            mode=_MODES[message.mode],
        )
    except ParameterError as error:
        raise InvalidRequestError(f"sampling.{error.field}", error.message) from None
