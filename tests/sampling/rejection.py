"""Whole walks of rejection sampling, as the tests state them; a chain is a tree without branches."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.draft_tree import DraftTree
from paceline.drafts import DrawRule, SiblingDraws
from paceline.sampling.distribution import DraftDistribution
from paceline.sampling.probabilities import ProbRows
from paceline.sampling.tree_rejection import RejectionWalk, keyed_walk
from paceline.sampling.verify import Verdict


def decide_chain(
    draft_tokens: Sequence[int],
    draft_dists: Sequence[DraftDistribution],
    target_probs: Tensor | ProbRows,
    accept_noise: Sequence[float],
    final_noise: Sequence[float],
) -> Verdict:
    """Speculative sampling of a chain as a function of its uniform numbers.

    Leviathan et al., arXiv 2211.17192, Algorithm 1; Chen et al., arXiv 2302.01318, Algorithm 2.

    1. For i = 0, 1, ...: accept x_i if u_i < p_i(x_i) / q_i(x_i). The comparison is strict: a token to which the
       target gives probability zero is never accepted, not even at u = 0. Nor is a token to which its own drafter
       gives probability zero.
    2. At the first rejection draw from max(p_i - q_i, 0), normalised. Where that is empty draw from p_i: p_i equals
       q_i there, and only rounding can have caused the rejection.
    3. Without a rejection draw the bonus token from the target's next distribution.

    Args:
        draft_tokens: k token ids.
        draft_dists: k distributions the tokens were drawn from.
        target_probs: [k + 1, vocab] float64, after temperature and filters.
        accept_noise: k numbers in (0, 1), one per drafted position.
        final_noise: k + 1 numbers in (0, 1), one per position, of which the one at the end of the walk is
            used.

    Raises:
        ValueError: lengths disagree.
        DraftError: a token lies outside the vocabulary.
    """
    return decide_tree(drawn_chain(draft_tokens, draft_dists), target_probs, accept_noise, final_noise)


def verify_chain_rejection(
    draft_tokens: Sequence[int],
    draft_dists: Sequence[DraftDistribution],
    target_probs: Tensor | ProbRows,
    seed: int,
    start: int,
) -> Verdict:
    """`decide_chain` with noise keyed by seed and absolute position, so that no earlier step influences it.

    Args:
        draft_tokens: k token ids proposed for positions start, start + 1, ...
        draft_dists: k distributions the tokens were drawn from.
        target_probs: [k + 1, vocab] float64
        seed: the request's seed.
        start: committed length.
    """
    return verify_tree_rejection(drawn_chain(draft_tokens, draft_dists), target_probs, seed, start)


def drawn_chain(tokens: Sequence[int], dists: Sequence[DraftDistribution]) -> DraftTree:
    """The tree without branches whose token i was drawn from distribution i."""
    if len(tokens) != len(dists):
        raise ValueError(f"{len(tokens)} tokens but {len(dists)} distributions")
    num_tokens = len(tokens)
    return DraftTree(
        tuple(tokens),
        tuple(range(-1, num_tokens - 1)),
        tuple(range(1, num_tokens + 1)),
        (1.0,) * num_tokens,
        tuple(
            SiblingDraws((token,), DrawRule.WITHOUT_REPLACEMENT, dist)
            for token, dist in zip(tokens, dists, strict=True)
        ),
    )


def decide_tree(
    tree: DraftTree,
    target_probs: Tensor | ProbRows,
    accept_noise: Sequence[float],
    final_noise: Sequence[float],
) -> Verdict:
    """The verdict of a :class:`RejectionWalk`, whose arguments it takes."""
    return _to_its_end(RejectionWalk(tree, target_probs, accept_noise, final_noise))


def verify_tree_rejection(tree: DraftTree, target_probs: Tensor | ProbRows, seed: int, start: int) -> Verdict:
    """`decide_tree` with the noise of :func:`keyed_walk`, whose arguments it takes."""
    return _to_its_end(keyed_walk(tree, target_probs, seed, start))


def _to_its_end(walk: RejectionWalk) -> Verdict:
    while (verdict := walk.step()) is None:
        pass
    return verdict
