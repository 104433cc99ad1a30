"""Log-probabilities as a client sees them: one value for each token.

Responsible for: unpacking the wire's arrays. Deliberately does not know: events, calls. Called by
:mod:`paceline.client.events`.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.v1 import sampling_pb2


@dataclass(frozen=True, slots=True)
class TokenLogProb:
    """The target's log-probability of one token, before any sampling parameter.

    Attributes:
        token_id: the token.
        log_prob: natural logarithm of its probability.
        rank: its rank among all tokens, 1 for the likeliest.
        top: the likeliest tokens, each with its log-probability; as many as requested.
    """

    token_id: int
    log_prob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


def read_log_probs(token_ids: tuple[int, ...], message: sampling_pb2.LogProbs) -> tuple[TokenLogProb, ...]:
    """One entry for each token; empty if the server sent none."""
    if not message.log_probs:
        return ()
    num_top = message.num_top
    pairs = list(zip(message.top_token_ids, message.top_log_probs, strict=True))
    return tuple(
        TokenLogProb(token_id, log_prob, rank, tuple(pairs[index * num_top : (index + 1) * num_top]))
        for index, (token_id, log_prob, rank) in enumerate(
            zip(token_ids, message.log_probs, message.ranks, strict=True)
        )
    )
