"""Recursive rejection sampling on a drafted tree.

Responsible for: accepting drafted tokens so that the committed text has exactly the target's distribution. This
holds if every token with a distribution really was drawn from it, and if no token's own value decided whether
it is in the tree (`DraftTrie.select_drawn_tree`). A drafter that lies about the first condition can bias the
text; that is why coupled mode is the default. A token without a distribution needs no condition: it may be any
function of the text before it.

Deliberately does not know: logits, processors, the trie, the wire.

Called by: `batch`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.draft_tree import DraftTree
from paceline.drafts import DrawRule
from paceline.sampling.distribution import DraftDistribution, inverse_cdf
from paceline.sampling.noise import NoiseRole, uniform_scalar
from paceline.sampling.probabilities import ProbRows, draw_without
from paceline.sampling.siblings import check_tokens, children_of, distribution_of, draws_of
from paceline.sampling.verify import FinalKind, Verdict


class Candidates:
    """The rest of the target's distribution at one node while its children are rejected one after the other.

    Sibling j is accepted with probability min(1, p_j(x_j) / q_j(x_j)). If it is rejected, p_{j+1} =
    norm(max(p_j - q_j, 0)). Whatever the law of the draws, one such step is Leviathan's: given p_j and the
    earlier draws, its result has the law p_j. By induction from the last child to the first, the node's token
    has the law p_1 = p. q_j is the distribution itself for siblings drawn with replacement (SpecInfer, arXiv
    2305.09781, section 4.3), the distribution without the earlier siblings for draws without replacement
    (Sequoia, arXiv 2402.12374, section 3.2), and certainty for a token that was not drawn (EAGLE-2, arXiv
    2406.16858).

    Args:
        target_probs: [rows, vocab] float64
        row: the node's row; only single probabilities of it are read before a drawn sibling is rejected.
        dist: the distribution that the siblings were drawn from; None where they were not drawn.
        rule: how they were drawn.
    """

    def __init__(
        self, target_probs: Tensor | ProbRows, row: int, dist: DraftDistribution | None, rule: DrawRule
    ) -> None:
        self._target_probs = target_probs
        self._row = row
        self._residual: Tensor | None = None  # None while no drawn token has been rejected
        self._rejected: list[int] = []  # rejected tokens that were not drawn
        self._mass = 1.0  # probability of all other tokens
        self._dist = dist
        self._rule = rule
        self._left = None if dist is None else dist.probs.clone()  # not normalised

    def accept_prob(self, token: int) -> float:
        """p_j(x_j) / q_j(x_j), which may be above 1; 0 for a token that its own drafter could not have drawn."""
        draft_prob = 1.0
        if self._dist is not None:
            assert self._left is not None
            draft_prob = float(self._left[self._dist.token_ids == token].sum() / self._left.sum())
        # NaN fails the comparison as zero does. It occurs if a peer names more draws than the support has
        # tokens.
        if not draft_prob > 0:
            return 0.0
        if self._residual is None:
            return float(self._target_probs[self._row, token]) / self._mass / draft_prob
        return float(self._residual[token]) / draft_prob

    def reject(self, token: int) -> None:
        """Reject this sibling."""
        if self._dist is None:
            left = self._mass - float(self._target_probs[self._row, token])
            if token not in self._rejected and left > 0:
                self._rejected.append(token)
                self._mass = left
            return
        assert self._left is not None
        residual = (self._target_probs[self._row] if self._residual is None else self._residual).clone()
        total = self._left.sum()
        if float(total) > 0:
            ids = self._dist.token_ids.to(residual.device)
            residual.index_add_(0, ids, -(self._left / total).to(residual.device))
            residual.clamp_(min=0)
        if self._rule is DrawRule.WITHOUT_REPLACEMENT:
            self._left[self._dist.token_ids == token] = 0
        mass = residual.sum()
        # Empty where p_j = q_j: only rounding can have caused the rejection, and p_j itself is the right
        # distribution.
        if float(mass) > 0:
            self._residual = residual / mass

    def draw(self, noise: float) -> int:
        """The node's token, given that all its siblings so far were rejected."""
        if self._residual is not None:
            return inverse_cdf(self._residual, noise)
        return draw_from(self._target_probs, self._row, noise, self._rejected)


def draw_from(probs: Tensor | ProbRows, row: int, noise: float, without: Sequence[int] = ()) -> int:
    """A token from one row, leaving out some. Of `ProbRows` only the single probabilities needed are computed."""
    if isinstance(probs, ProbRows):
        return probs.draw(row, noise, without)
    return draw_without(probs[row], noise, without)


class RejectionWalk:
    """A walk down one tree by recursive rejection, one row at a time, as a function of its uniform numbers.

    1. At a row try its children in order: child j is accepted if u < p_j(x_j) / q_j(x_j). The comparison is
       strict, so that a token of probability zero is never accepted.
    2. At an accepted child continue with its row's distribution.
    3. If no child is accepted, draw the recovered token from the rest of the row's distribution. If the row has
       no children, draw the bonus token from the whole of it.

    Args:
        tree: the draft; siblings that were drawn are in the order of their draws.
        target_probs: [nodes + 1, vocab] float64, after temperature and filters; row 0 is the root's, row i + 1
            node i's.
        accept_noise: a number in (0, 1) for each node.
        final_noise: a number in (0, 1) for each depth from 0 to the tree's; the one at which the walk ends is
            used.

    Raises:
        ValueError: lengths disagree.
        DraftError: a token lies outside the vocabulary.
    """

    def __init__(
        self,
        tree: DraftTree,
        target_probs: Tensor | ProbRows,
        accept_noise: Sequence[float],
        final_noise: Sequence[float],
    ) -> None:
        num_depths = max(tree.depths, default=0) + 1
        if target_probs.shape[0] != len(tree) + 1 or len(accept_noise) != len(tree):
            raise ValueError(
                f"{len(tree)} nodes, {len(accept_noise)} numbers for them, {target_probs.shape[0]} target rows"
            )
        if len(final_noise) < num_depths:
            raise ValueError(f"{num_depths} depths but {len(final_noise)} numbers for them")
        check_tokens(tree, target_probs.shape[1])
        self._tree = tree
        self._children = children_of(tree)
        self._target_probs = target_probs
        self._accept_noise = accept_noise
        self._final_noise = final_noise
        self._rows: list[int] = []
        self._tokens: list[int] = []

    @property
    def row(self) -> int:
        """The row whose probabilities are needed next."""
        return self._rows[-1] if self._rows else 0

    def rows_ahead(self, count: int) -> list[int]:
        """The row needed next, and the rows needed after it if first children are accepted; at most `count` in
        all.
        """
        rows = [self.row]
        while len(rows) < count and rows[-1] in self._children:
            rows.append(self._children[rows[-1]][0] + 1)
        return rows

    def step(self) -> Verdict | None:
        """Decide at the current row; a verdict when the walk ends there."""
        row, noise = self.row, self._final_noise[len(self._rows)]
        siblings = self._children.get(row)
        if siblings is None:
            return self._verdict(
                draw_from(self._target_probs, row, noise),
                FinalKind.BONUS if self._rows else FinalKind.PLAIN,
            )
        draws = draws_of(self._tree, siblings[0])
        candidates = (
            Candidates(self._target_probs, row, None, DrawRule.TOP)
            if draws is None
            else Candidates(self._target_probs, row, distribution_of(draws), draws.rule)
        )
        for node in siblings:
            if draws_of(self._tree, node) is not draws:
                raise ValueError(
                    "a tree contains siblings of two draws; select one with DraftTrie.select_drawn_tree"
                )
            token = self._tree.tokens[node]
            if self._accept_noise[node] < candidates.accept_prob(token):
                self._rows.append(node + 1)
                self._tokens.append(token)
                return None
            candidates.reject(token)
        return self._verdict(candidates.draw(noise), FinalKind.RECOVERED)

    def _verdict(self, final: int, kind: FinalKind) -> Verdict:
        return Verdict(tuple(self._rows), tuple(self._tokens), final, kind)


def keyed_walk(tree: DraftTree, target_probs: Tensor | ProbRows, seed: int, start: int) -> RejectionWalk:
    """A walk with noise keyed by seed, absolute position and rank among siblings.

    A walk decides a position once, so that no later step uses the same number again.

    Args:
        tree: the draft.
        target_probs: [nodes + 1, vocab] float64
        seed: the request's seed.
        start: committed length.
    """
    num_before: dict[int, int] = {}
    accept = []
    for parent, depth in zip(tree.parents, tree.depths, strict=True):
        rank = num_before.get(parent, 0)
        num_before[parent] = rank + 1
        accept.append(uniform_scalar(seed, start + depth - 1, NoiseRole.ACCEPT, rank))
    num_depths = max(tree.depths, default=0) + 1
    final = [uniform_scalar(seed, start + depth, NoiseRole.FINAL) for depth in range(num_depths)]
    return RejectionWalk(tree, target_probs, accept, final)
