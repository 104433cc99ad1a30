"""Checks an OpenSequence from the wire and turns it into a SequenceSpec.

Every id and count is compared with the model's limits here, before anything indexes a tensor with it.
"""

from __future__ import annotations

from paceline.contract.errors import InvalidRequestError
from paceline.v1 import peer_pb2, target_pb2
from services.runtime.sampling import check_log_probs, check_token_ids, sampling_params
from services.verifier.sequence import SequenceSpec

MAX_STOP_TOKENS = 64
MAX_DRAFT_NODES = 1024


def sequence_spec(opening: target_pb2.OpenSequence, info: peer_pb2.PeerInfo) -> SequenceSpec:
    """A checked specification.

    Args:
        opening: as it came.
        info: of this verifier.

    Raises:
        InvalidRequestError: naming the field that is out of range.
    """
    vocab_size, max_positions = info.vocab_size, info.max_positions
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
    if opening.stop_token_ids and max(opening.stop_token_ids) >= vocab_size:
        raise InvalidRequestError(
            "stop_token_ids", f"token id {max(opening.stop_token_ids)} is not below {vocab_size}"
        )
    if opening.max_draft_nodes > MAX_DRAFT_NODES:
        raise InvalidRequestError("max_draft_nodes", f"must be at most {MAX_DRAFT_NODES}")
    sampling = sampling_params(opening.sampling)
    check_token_ids(sampling, vocab_size)
    num_top, num_prompt_top = check_log_probs(opening.log_probs, vocab_size)
    return SequenceSpec(
        key=opening.key,
        epoch=opening.epoch,
        prompt=prompt,
        sampling=sampling,
        max_new_tokens=opening.max_new_tokens - opening.num_resumed_tokens,
        stop_token_ids=frozenset(opening.stop_token_ids),
        max_draft_nodes=opening.max_draft_nodes,
        num_resumed_tokens=opening.num_resumed_tokens,
        num_top=num_top,
        num_prompt_top=num_prompt_top,
        # Log-probabilities of the prompt need the logits of all its rows.
        may_share_prefix=not opening.log_probs.HasField("num_prompt_top"),
        reads_features=_reads_features(opening, info),
    )


def _reads_features(opening: target_pb2.OpenSequence, info: peer_pb2.PeerInfo) -> bool:
    if not opening.HasField("reads_features"):
        return True
    has_drafter = bool(info.method)
    if opening.reads_features and has_drafter and not info.tap.width:
        raise InvalidRequestError("reads_features", f"must not be true: {info.method} reads no features")
    if not opening.reads_features and has_drafter and info.tap.width and not info.tap.is_optional:
        raise InvalidRequestError(
            "reads_features", f"must not be false: {info.method} cannot draft without features"
        )
    return opening.reads_features
