"""Log-probabilities on the wire: checked against the request, and cut and joined as their tokens are.

Responsible for: the packed layout of paceline.v1.LogProbs. Deliberately does not know: how they are computed, who asks
for them. Called by: the conductor, which cuts repeated ones and joins those that a slow reader has not read, and the
gateway, which cuts at stop texts.
"""

from __future__ import annotations

from paceline.v1 import sampling_pb2


def check_log_probs(message: sampling_pb2.LogProbs, num_tokens: int, num_top: int, vocab_size: int) -> None:
    """Refuse log-probabilities that do not describe exactly these tokens.

    Raises:
        ValueError: array lengths do not add up, or an id is outside the vocabulary.
    """
    if len(message.log_probs) != num_tokens or len(message.ranks) != num_tokens:
        raise ValueError(
            f"{num_tokens} tokens but {len(message.log_probs)} log-probabilities and {len(message.ranks)} ranks"
        )
    if num_tokens and message.num_top != num_top:
        raise ValueError(f"{message.num_top} alternatives for each token, {num_top} were asked for")
    num_alternatives = num_tokens * num_top
    if len(message.top_token_ids) != num_alternatives or len(message.top_log_probs) != num_alternatives:
        raise ValueError(
            f"{num_alternatives} alternatives were asked for, not {len(message.top_token_ids)} ids and "
            f"{len(message.top_log_probs)} log-probabilities"
        )
    if message.top_token_ids and max(message.top_token_ids) >= vocab_size:
        raise ValueError(f"an alternative is outside the vocabulary of {vocab_size} tokens")


def cut_log_probs(message: sampling_pb2.LogProbs, start: int, stop: int) -> sampling_pb2.LogProbs:
    """The log-probabilities of tokens `start` to `stop`."""
    num_top = message.num_top
    return sampling_pb2.LogProbs(
        log_probs=message.log_probs[start:stop],
        ranks=message.ranks[start:stop],
        num_top=num_top,
        top_token_ids=message.top_token_ids[start * num_top : stop * num_top],
        top_log_probs=message.top_log_probs[start * num_top : stop * num_top],
    )


def join_log_probs(message: sampling_pb2.LogProbs, more: sampling_pb2.LogProbs) -> None:
    """Append those of the tokens that follow. Both have the same number of alternatives, or `message` is empty."""
    message.MergeFrom(more)
