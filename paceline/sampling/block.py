"""Block verification: a drafted chain verified as a whole.

Responsible for: accepting the longest possible prefix of a chain such that the committed text has exactly the
target's distribution. On average it is at least as long as with token-by-token rejection.

Deliberately does not know: logits, processors, the trie, the wire.

Called by: `batch`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.draft_tree import DraftTree
from paceline.sampling.distribution import DraftDistribution, inverse_cdf
from paceline.sampling.noise import NoiseRole, uniform_scalar
from paceline.sampling.siblings import check_tokens, distribution_of, draws_of
from paceline.sampling.verify import FinalKind, Verdict


def decide_block(
    tree: DraftTree, target_probs: Tensor, accept_noise: Sequence[float], final_noise: float
) -> Verdict:
    """Block verification as a function of its uniform numbers (Sun et al., arXiv 2403.10444, Algorithm 2).

    1. s_0 = 1, s_i = min(1, s_{i-1} p_i(x_i) / q_i(x_i)): the probability with which the first i tokens must be
       kept.
    2. The prefix of length i qualifies with probability h_i = S_i / (S_i + 1 - s_i), where S_i = sum over x of
       max(s_i p_{i+1}(x) - q_{i+1}(x), 0); the whole chain qualifies with probability s_k. If no longer prefix
       qualifies, this keeps the first i tokens with total probability s_i.
    3. Keep the longest prefix that qualifies. After the whole chain draw the bonus token from the target. After
       a prefix of length i draw from max(s_i p_{i+1} - q_{i+1}, 0), normalised.

    Later tokens are read even where a shorter prefix does not qualify: a token that is likelier under the
    target than under the drafter compensates for one that is less likely.

    Args:
        tree: a chain of k tokens; one that was not drawn counts as drawn with certainty.
        target_probs: [k + 1, vocab] float64, after temperature and filters.
        accept_noise: k numbers in (0, 1); number i - 1 decides about the prefix of length i.
        final_noise: a number in (0, 1) for the last token.

    Raises:
        ValueError: the tree is not a chain, or lengths disagree.
        DraftError: a token lies outside the vocabulary.
    """
    num_drafts, vocab = len(tree), target_probs.shape[1]
    if any(parent != node - 1 for node, parent in enumerate(tree.parents)):
        raise ValueError("block mode verifies chains; select one with DraftTrie.select_drawn_chain")
    if target_probs.shape[0] != num_drafts + 1 or len(accept_noise) != num_drafts:
        raise ValueError(
            f"{num_drafts} drafts, {len(accept_noise)} numbers for them, {target_probs.shape[0]} target rows"
        )
    check_tokens(tree, vocab)
    dists = []
    for node, token in enumerate(tree.tokens):
        draws = draws_of(tree, node)
        dists.append(DraftDistribution.point_mass(token) if draws is None else distribution_of(draws))
    keep = [1.0]  # s_i
    for index, (token, dist) in enumerate(zip(tree.tokens, dists, strict=True)):
        draft_prob = dist.prob(token)
        ratio = float(target_probs[index, token]) / draft_prob if draft_prob > 0 else 0.0
        keep.append(min(1.0, keep[-1] * ratio))
    for length in range(num_drafts, -1, -1):
        if length == num_drafts:
            residual, long_enough = target_probs[length], keep[length]
        else:
            residual = dists[length].subtracted_from(target_probs[length] * keep[length])
            mass = float(residual.sum())
            # At s_i = 1 this prefix or a longer one is certainly kept; S_i may then be empty.
            long_enough = 1.0 if keep[length] == 1.0 else mass / (mass + 1.0 - keep[length])
            if not mass > 0:  # p = q: only rounding leads here, and p itself is the right distribution
                residual = target_probs[length]
        if length == 0 or accept_noise[length - 1] < long_enough:
            break
    kind = FinalKind.RECOVERED if length < num_drafts else FinalKind.BONUS if num_drafts else FinalKind.PLAIN
    final = inverse_cdf(residual, final_noise)
    return Verdict(tuple(range(1, length + 1)), tree.tokens[:length], final, kind)


def verify_block(tree: DraftTree, target_probs: Tensor, seed: int, start: int) -> Verdict:
    """`decide_block` with noise keyed by seed and the block's first position.

    Rejection keys its noise by the position of each token instead. A block reads tokens past those that it
    keeps, so the next block needs numbers that have not been used. No two blocks begin at the same committed
    length.

    Args:
        tree: a chain.
        target_probs: [k + 1, vocab] float64
        seed: the request's seed.
        start: committed length.
    """
    accept = [uniform_scalar(seed, start, NoiseRole.ACCEPT, index) for index in range(len(tree))]
    return decide_block(tree, target_probs, accept, uniform_scalar(seed, start, NoiseRole.FINAL))
