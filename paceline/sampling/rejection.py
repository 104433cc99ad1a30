"""Chain rejection sampling.

Responsible for: accepting drafted tokens so that what is committed has exactly the target's distribution,
given that every drafted token really was drawn from the distribution that came with it. A drafter that lies
about it can bend the text; that is why coupled mode is the default.

Deliberately does not know: logits, processors, the trie, the wire.

Called by: `batch`; drafters (`sample_draft`); the wire codec (`DraftDistribution.truncated` checks what a
peer sent).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.drafts import DraftError
from paceline.sampling.noise import NoiseRole, uniform_scalar
from paceline.sampling.processors import ProbRows
from paceline.sampling.verify import FinalKind, Verdict

_SUM_TOLERANCE = 1e-2  # bfloat16 probabilities on the wire; renormalised after the check


@dataclass(frozen=True, eq=False)
class DraftDistribution:
    """The distribution a drafted token was drawn from, on its support.

    Attributes:
        token_ids: [m] int64, distinct.
        probs: [m] float64, not negative, sum 1.
    """

    token_ids: Tensor
    probs: Tensor

    @classmethod
    def dense(cls, probs: Tensor) -> DraftDistribution:
        """From probabilities over the whole vocabulary, [vocab]."""
        return cls.truncated(torch.arange(probs.shape[-1], device=probs.device), probs, probs.shape[-1])

    @classmethod
    def point_mass(cls, token: int) -> DraftDistribution:
        """For a drafter that did not draw at all: its most likely token, with certainty."""
        return cls(torch.tensor([token]), torch.ones(1, dtype=torch.float64))

    @classmethod
    def truncated(cls, token_ids: Tensor, probs: Tensor, vocab_size: int) -> DraftDistribution:
        """From a support and its probabilities. Nothing is believed before it is checked.

        Raises:
            DraftError: shapes disagree, an id is out of range or repeated, a probability is negative or not
                finite, or they are far from summing to 1.
        """
        if token_ids.dim() != 1 or token_ids.shape != probs.shape or not token_ids.numel():
            raise DraftError(f"{list(token_ids.shape)} ids and {list(probs.shape)} probabilities")
        if token_ids.dtype != torch.int64:
            raise DraftError(f"token ids must be int64, got {token_ids.dtype}")
        if int(token_ids.min()) < 0 or int(token_ids.max()) >= vocab_size:
            raise DraftError(f"a token id lies outside the vocabulary of {vocab_size}")
        if token_ids.unique().numel() != token_ids.numel():
            raise DraftError("a token id is repeated")
        exact = probs.to(torch.float64)
        total = float(exact.sum())
        if not bool((exact >= 0).all()) or not math.isfinite(total) or abs(total - 1) > _SUM_TOLERANCE:
            raise DraftError(f"not a distribution: smallest {float(exact.min())}, sum {total}")
        return cls(token_ids, exact / total)

    def prob(self, token: int) -> float:
        """The probability of one token; 0 outside the support."""
        return float(self.probs[self.token_ids == token].sum())

    def subtracted_from(self, probs: Tensor) -> Tensor:
        """max(probs - self, 0) for probabilities over the vocabulary, [vocab] float64; not normalised."""
        difference = probs.clone()
        difference.index_add_(0, self.token_ids.to(probs.device), -self.probs.to(probs.device))
        return difference.clamp_(min=0)


def decide_chain(
    draft_tokens: Sequence[int],
    draft_dists: Sequence[DraftDistribution],
    target_probs: Tensor | ProbRows,
    accept_noise: Sequence[float],
    final_noise: Sequence[float],
) -> Verdict:
    """Speculative sampling of a chain as a function of its uniform numbers (Leviathan et al., arXiv
    2211.17192, Algorithm 1; Chen et al., arXiv 2302.01318, Algorithm 2).

    1. For i = 0, 1, ...: accept x_i if u_i < p_i(x_i) / q_i(x_i). Strict: a token the target gives
    probability zero
       is never accepted, not even at u = 0; nor is one its own drafter gives probability zero.
    2. At the first rejection draw from max(p_i - q_i, 0), normalised. Where that is empty (p_i = q_i, so
    rejection
       is impossible but for rounding) draw from p_i.
    3. Without a rejection draw the bonus token from the target's next distribution.

    Args:
        draft_tokens: k token ids.
        draft_dists: k distributions the tokens were drawn from.
        target_probs: [k + 1, vocab] float64, after temperature and filters.
        accept_noise: k numbers in (0, 1), one per drafted position.
        final_noise: k + 1 numbers in (0, 1), one per position, of which the one at the end of the walk is
            used.
    """
    num_drafts = len(draft_tokens)
    if len(draft_dists) != num_drafts or target_probs.shape[0] != num_drafts + 1:
        raise ValueError(
            f"{num_drafts} drafts, {len(draft_dists)} distributions, {target_probs.shape[0]} target rows"
        )
    vocab = target_probs.shape[1]
    for index, (token, dist) in enumerate(zip(draft_tokens, draft_dists, strict=True)):
        if not 0 <= token < vocab:
            raise DraftError(f"draft token {token} is outside the vocabulary of {vocab}")
        target_prob, draft_prob = float(target_probs[index, token]), dist.prob(token)
        if draft_prob > 0 and accept_noise[index] < target_prob / draft_prob:
            continue
        residual = dist.subtracted_from(target_probs[index])
        if not float(residual.sum()) > 0:
            residual = target_probs[index]
        recovered = inverse_cdf(residual, final_noise[index])
        return Verdict(
            tuple(range(1, index + 1)), tuple(draft_tokens[:index]), recovered, FinalKind.RECOVERED
        )
    bonus = inverse_cdf(target_probs[num_drafts], final_noise[num_drafts])
    kind = FinalKind.BONUS if num_drafts else FinalKind.PLAIN
    return Verdict(tuple(range(1, num_drafts + 1)), tuple(draft_tokens), bonus, kind)


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
    positions = range(start, start + len(draft_tokens) + 1)
    accept = [uniform_scalar(seed, position, NoiseRole.ACCEPT) for position in positions[:-1]]
    final = [uniform_scalar(seed, position, NoiseRole.FINAL) for position in positions]
    return decide_chain(draft_tokens, draft_dists, target_probs, accept, final)


def sample_draft(probs: Tensor, seed: int, position: int) -> int:
    """A drafter's draw in rejection mode, from [vocab] probabilities; independent of all the target's draws."""
    return inverse_cdf(probs.to(torch.float64), uniform_scalar(seed, position, NoiseRole.DRAFT))


def inverse_cdf(weights: Tensor, noise: float) -> int:
    """The index at which the running sum of [n] float64 weights passes ``noise`` times their total.

    An index of weight zero is never returned.
    """
    cumulative = weights.cumsum(dim=0)
    index = int(torch.searchsorted(cumulative, noise * cumulative[-1], right=True))
    if index >= weights.numel():  # the product was rounded up to the total
        index = int(weights.nonzero()[-1])
    return index
