"""The likeliest tree from one distribution for each depth.

If a drafter's distribution at a depth does not depend on the tokens before, the probability of a path is the product of
its tokens' probabilities. The nodes with the largest products are the tree with the most expected accepted tokens. A
product never rises along a path, so the chosen nodes always contain their ancestors.

Pure, without tensors. Called by drafters that propose all depths in one pass.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from paceline.drafts import DraftEntry


def marginal_tree(
    start: int, log_probs: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]], max_nodes: int
) -> DraftEntry:
    """The likeliest `max_nodes` nodes, likeliest first; of equal nodes the one reached first comes first.

    Args:
        start: committed length that the tree continues.
        log_probs: natural log-probabilities of each depth, largest first.
        tokens: their target ids.
        max_nodes: most nodes.
    """
    out_tokens: list[int] = []
    out_parents: list[int] = []
    out_log_probs: list[float] = []
    # Score, order of arrival, score and index of the parent, depth, rank among the parent's children.
    frontier: list[tuple[float, int, float, int, int, int]] = []
    arrived = 0

    def reach(parent_score: float, parent: int, depth: int, rank: int) -> None:
        nonlocal arrived
        if depth < len(log_probs) and rank < len(log_probs[depth]):
            score = parent_score - log_probs[depth][rank]
            heapq.heappush(frontier, (score, arrived, parent_score, parent, depth, rank))
            arrived += 1

    reach(0.0, -1, 0, 0)
    while frontier and len(out_tokens) < max_nodes:
        score, _, parent_score, parent, depth, rank = heapq.heappop(frontier)
        node = len(out_tokens)
        out_tokens.append(tokens[depth][rank])
        out_parents.append(parent)
        out_log_probs.append(min(0.0, log_probs[depth][rank]))
        reach(score, node, depth + 1, 0)
        reach(parent_score, parent, depth, rank + 1)
    return DraftEntry(start, tuple(out_tokens), tuple(out_parents), tuple(out_log_probs))
