"""Typical acceptance, which is not exact.

Responsible for: keeping drafted tokens that are likely enough under the target, given the target's entropy. The
text does not have the target's distribution: the drafter chose a kept token, whatever its odds. Only for
requests that ask for it.

Deliberately does not know: logits, processors, the trie, what each token was drawn from.

Called by: `batch`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.draft_tree import DraftTree
from paceline.sampling.distribution import inverse_cdf
from paceline.sampling.noise import NoiseRole, uniform_scalar
from paceline.sampling.siblings import check_tokens
from paceline.sampling.verify import FinalKind, Verdict


def decide_typical(
    tree: DraftTree, target_probs: Tensor, epsilon: float, delta: float, final_noise: Sequence[float]
) -> Verdict:
    """Keep the longest path whose tokens are all typical (Medusa, arXiv 2401.10774, section 2.3.1).

    1. A token is typical if p(x) > min(epsilon, delta * exp(-H(p))), where p is the target's distribution
       before it and H its entropy in nats.
    2. Keep the longest path of typical tokens; of equally long ones the one with the largest sum of log p; of
       equals the first.
    3. Draw the token after it from the target.

    Args:
        tree: the draft.
        target_probs: [nodes + 1, vocab] float64, after temperature and filters.
        epsilon: threshold in (0, 1] at low entropy.
        delta: factor in (0, 1] of the threshold at high entropy.
        final_noise: a number in (0, 1) for each depth from 0 to the tree's; the one at which the path ends is
            used.

    Raises:
        ValueError: lengths disagree.
        DraftError: a token lies outside the vocabulary.
    """
    if target_probs.shape[0] != len(tree) + 1:
        raise ValueError(f"{len(tree)} nodes but {target_probs.shape[0]} target rows")
    if len(final_noise) <= max(tree.depths, default=0):
        raise ValueError(f"{max(tree.depths)} depths but {len(final_noise)} numbers")
    check_tokens(tree, target_probs.shape[1])
    entropies = torch.special.entr(target_probs).sum(dim=-1)  # [nodes + 1]
    bounds = (delta * (-entropies).exp()).clamp(max=epsilon).tolist()
    sums: dict[int, float] = {-1: 0.0}  # nodes of typical paths: sum of log p
    best = -1
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        prob = float(target_probs[parent + 1, token])
        if parent not in sums or not prob > bounds[parent + 1]:
            continue
        sums[node] = sums[parent] + math.log(prob)
        depth = tree.depths[node]
        best_depth = tree.depths[best] if best >= 0 else 0
        if depth > best_depth or (depth == best_depth and sums[node] > sums[best]):
            best = node
    path: list[int] = []
    node = best
    while node >= 0:
        path.append(node)
        node = tree.parents[node]
    path.reverse()
    final = inverse_cdf(target_probs[best + 1], final_noise[len(path)])
    has_children = best in tree.parents
    kind = FinalKind.RECOVERED if has_children else FinalKind.BONUS if path else FinalKind.PLAIN
    return Verdict(tuple(node + 1 for node in path), tuple(tree.tokens[node] for node in path), final, kind)


def verify_typical(
    tree: DraftTree, target_probs: Tensor, epsilon: float, delta: float, seed: int, start: int
) -> Verdict:
    """`decide_typical` with noise keyed by seed and absolute position.

    Args:
        tree: what was drafted.
        target_probs: [nodes + 1, vocab] float64
        epsilon: see `decide_typical`.
        delta: see `decide_typical`.
        seed: the request's seed.
        start: committed length.
    """
    num_depths = max(tree.depths, default=0) + 1
    final = [uniform_scalar(seed, start + depth, NoiseRole.FINAL) for depth in range(num_depths)]
    return decide_typical(tree, target_probs, epsilon, delta, final)
