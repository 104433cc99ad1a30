"""A sibling chain: a drafted chain whose tokens were drawn, with further draws at each position.

The chain continues from the first draw of each position, so siblings cost no pass of the drafter. The number of draws
at each position is fixed before anything is drawn, because exactness requires it. Called by the drafters.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.drafts import DraftEntry, SiblingDraws
from paceline.methods.choice import log_prob_of


def num_draws(place: int, num_tokens: int, max_nodes: int) -> int:
    """Draws at one position of a chain of `num_tokens` tokens and `max_nodes` nodes; first positions get one more."""
    spare = max(max_nodes - num_tokens, 0)
    return 1 + spare // num_tokens + (place < spare % num_tokens)


def sibling_chain_entry(start: int, draws: Sequence[SiblingDraws]) -> DraftEntry:
    """The draws of each position as an entry from committed length `start`."""
    tokens: list[int] = []
    parents: list[int] = []
    log_probs: list[float] = []
    drawn: list[SiblingDraws] = []
    parent = -1
    for siblings in draws:
        first = len(tokens)
        for token in siblings.tokens:
            tokens.append(token)
            parents.append(parent)
            log_probs.append(log_prob_of(siblings, token))
            drawn.append(siblings)
        parent = first
    return DraftEntry(start, tuple(tokens), tuple(parents), tuple(log_probs), draft_dists=tuple(drawn))
