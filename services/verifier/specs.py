"""Checks of an OpenSequence message, and the specification made of it.

Every id and count is compared with the model's limits here, before it indexes a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.contract import limits
from paceline.contract.errors import InvalidRequestError
from paceline.contract.fields import (
    check_integer,
    check_new_tokens,
    check_prompt,
    check_reads_features,
    check_stop_token_ids,
)
from paceline.sampling.params import SamplingParams
from paceline.v1 import peer_pb2, target_pb2
from services.runtime.sampling import log_prob_counts, sampling_params


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """What a conductor asked for; every value has been checked.

    Attributes:
        max_new_tokens: most tokens to commit at this verifier.
        num_resumed_tokens: tokens at the end of the prompt that another verifier generated.
        num_top: alternatives to report for each committed token; None reports no log-probabilities.
        num_prompt_top: the same for the prompt's tokens.
        may_share_prefix: False where every row of the prompt must be run for this request itself.
        reads_features: False where the sequence's drafter does not use the target's features.
    """

    key: int
    epoch: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    max_draft_nodes: int
    num_resumed_tokens: int = 0
    num_top: int | None = None
    num_prompt_top: int | None = None
    may_share_prefix: bool = True
    reads_features: bool = True

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the request's own prompt."""
        return len(self.prompt) - self.num_resumed_tokens


def sequence_spec(opening: target_pb2.OpenSequence, info: peer_pb2.PeerInfo) -> SequenceSpec:
    """A checked specification.

    Args:
        opening: as received.
        info: of this verifier.

    Raises:
        InvalidRequestError: naming the field that is out of range.
    """
    vocab_size, max_positions = info.vocab_size, info.max_positions
    prompt = tuple(opening.prompt_token_ids)
    if opening.key == 0:
        raise InvalidRequestError("key", "must be above 0")
    check_prompt("prompt_token_ids", prompt, vocab_size, max_positions)
    check_new_tokens(opening.max_new_tokens, opening.num_resumed_tokens, len(prompt), max_positions)
    check_stop_token_ids("stop_token_ids", opening.stop_token_ids, vocab_size)
    check_integer("max_draft_nodes", opening.max_draft_nodes, 0, limits.MAX_DRAFT_NODES)
    sampling = sampling_params(opening.sampling, vocab_size)
    num_top, num_prompt_top = log_prob_counts(opening.log_probs, vocab_size)
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
    """Whether features are kept for a drafter; a drafter of the verifier's own must be able to do as asked."""
    if not opening.HasField("reads_features"):
        return True
    if not info.method:
        return opening.reads_features
    return check_reads_features(
        opening.reads_features,
        has_tap=info.tap.width > 0,
        is_tap_optional=info.tap.is_optional,
        drafter=info.method,
    )
