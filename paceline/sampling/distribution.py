"""The distribution that a drafted token was drawn from, on its support.

Responsible for: its form, checks of one that a peer sent, and drawing by a uniform number.

Deliberately does not know: logits, which mode needs it, its form on the wire.

Called by: the verification modes, `draws`, the wire codec.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.drafts import DraftError

MAX_WEIGHT = 65535
"""Largest weight of a token: 16 bits on the wire."""

_SUM_TOLERANCE = 1e-2  # bfloat16 probabilities; renormalised after the check


@dataclass(frozen=True, eq=False)
class DraftDistribution:
    """The distribution that a drafted token was drawn from, on its support.

    Attributes:
        token_ids: [m] int64, distinct.
        probs: [m] float64, not negative, sum 1.
        weights: whole numbers proportional to the probabilities; None for a distribution that is never sent.
    """

    token_ids: Tensor
    probs: Tensor
    weights: Tensor | None = None

    @classmethod
    def dense(cls, probs: Tensor) -> DraftDistribution:
        """From probabilities over the whole vocabulary, [vocab]."""
        return cls.truncated(torch.arange(probs.shape[-1], device=probs.device), probs, probs.shape[-1])

    @classmethod
    def point_mass(cls, token: int) -> DraftDistribution:
        """For a drafter that did not draw: its most likely token, with certainty."""
        return cls(torch.tensor([token]), torch.ones(1, dtype=torch.float64))

    @classmethod
    def of_weights(cls, token_ids: Tensor, weights: Tensor) -> DraftDistribution:
        """From whole numbers, so that both peers compute the same probabilities to the last bit.

        Args:
            token_ids: [m] int64, distinct; the caller has checked them.
            weights: [m] int64, each from 1 to `MAX_WEIGHT`.
        """
        exact = weights.to(torch.float64)
        return cls(token_ids, exact / exact.sum(), weights)

    @classmethod
    def truncated(cls, token_ids: Tensor, probs: Tensor, vocab_size: int) -> DraftDistribution:
        """From a support and its probabilities, with every check.

        Raises:
            DraftError: shapes disagree, an id is out of range or repeated, a probability is negative or not
                finite, or their sum is far from 1.
        """
        if token_ids.dim() != 1 or token_ids.shape != probs.shape or not token_ids.numel():
            raise DraftError(
                f"{list(token_ids.shape)} ids and {list(probs.shape)} probabilities: need one of each, at least one"
            )
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


def inverse_cdf(weights: Tensor, noise: float) -> int:
    """The index at which the running sum of [n] float64 weights passes ``noise`` times their total.

    An index of weight zero is never returned.
    """
    cumulative = weights.cumsum(dim=0)
    index = int(torch.searchsorted(cumulative, noise * cumulative[-1], right=True))
    if index >= weights.numel():  # the product was rounded up to the total
        index = int(weights.nonzero()[-1])
    return index
