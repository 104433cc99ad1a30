"""Draft entries: what a drafter sends.

Responsible for: the fields of an entry, and refusing an entry that contradicts itself.

Deliberately does not know: the committed text, how entries merge, tensors, the wire.

Called by: drafters (build entries), the trie (checks and merges them).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

_LOG_PROB_SLACK = 1e-3  # a float16 log-softmax may round to slightly above zero
_LEAST_CONFIDENCE = 1e-9


class DraftError(ValueError):
    """A peer sent a draft entry that contradicts itself; no token of the entry was added."""


class DrawRule(StrEnum):
    """How a drafter chose the children of a node."""

    TOP = "top"
    """Not drawn: the likeliest tokens, which are a function of the text before them."""
    WITH_REPLACEMENT = "with_replacement"
    """Each token is drawn from the whole distribution; a token may occur twice."""
    WITHOUT_REPLACEMENT = "without_replacement"
    """Each token is drawn from the distribution without the tokens drawn before it."""


@dataclass(frozen=True, slots=True, eq=False)
class SiblingDraws:
    """Children of one node that were drawn together; each of these children refers to this object.

    Attributes:
        tokens: in the order they were drawn, repeats included.
        rule: with or without replacement.
        distribution: what the tokens were drawn from. It is opaque here; the verification modes expect a
            `paceline.sampling.distribution.DraftDistribution`.
        confidence: probability that the first draw is accepted given that its parent was. The drafter states it before
            the draw, so it depends on the tokens above alone. None where the drafter stated nothing.
    """

    tokens: tuple[int, ...]
    rule: DrawRule
    distribution: object
    confidence: float | None = None


@dataclass(frozen=True, slots=True)
class DraftEntry:
    """Proposed continuations of the text from committed length ``start`` on.

    Attributes:
        start: committed length that the drafter drafted from; the first token proposes position ``start``.
        tokens: proposed token ids in topological order.
        parents: for each token the index of its parent in this entry, always smaller than its own; -1 means
            ``y[start-1]``.
        log_probs: the drafter's log-probability of each token given its path; empty when unknown.
        confidences: calibrated probability that a token is accepted given that its parent was. Empty means
            exp(log_prob). A drawn token uses its siblings' `SiblingDraws.confidence`, where the drafter stated one.
        draft_dists: the draw of each token, None for a token that was not drawn. Only the modes that verify drawn
            tokens use it. Siblings are listed in the order of their draws and share one object.
    """

    start: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    log_probs: tuple[float, ...] = ()
    confidences: tuple[float, ...] = ()
    draft_dists: tuple[SiblingDraws | None, ...] | None = None

    @classmethod
    def chain(
        cls,
        start: int,
        tokens: Sequence[int],
        log_probs: Sequence[float] = (),
        confidences: Sequence[float] = (),
        draft_dists: Sequence[SiblingDraws | None] | None = None,
    ) -> DraftEntry:
        """An entry without branches: each token's parent is the token before it."""
        dists = None if draft_dists is None else tuple(draft_dists)
        parents = tuple(range(-1, len(tokens) - 1))
        return cls(start, tuple(tokens), parents, tuple(log_probs), tuple(confidences), dists)

    def check(self, max_tokens: int, vocab_size: int | None = None) -> None:
        """Check that the entry is consistent and within its limits.

        Raises:
            DraftError: lengths disagree, parents are not topological, a number is not finite or out of range.
        """
        tokens, parents = self.tokens, self.parents
        num_tokens = len(tokens)
        if type(self.start) is not int or self.start < 1:
            raise DraftError(f"start must be an integer of at least 1, got {self.start!r}")
        if num_tokens > max_tokens:
            raise DraftError(f"{num_tokens} tokens in one entry, at most {max_tokens} are allowed")
        if len(parents) != num_tokens:
            raise DraftError(f"{num_tokens} tokens but {len(parents)} parents")
        for name, values in (("log_probs", self.log_probs), ("confidences", self.confidences)):
            if values and len(values) != num_tokens:
                raise DraftError(f"{num_tokens} tokens but {len(values)} {name}")
        if self.draft_dists is not None and len(self.draft_dists) != num_tokens:
            raise DraftError(f"{num_tokens} tokens but {len(self.draft_dists)} draft_dists")
        for index, token in enumerate(tokens):
            parent = parents[index]
            if type(token) is not int or token < 0:
                raise DraftError(f"tokens[{index}] is not a token id: {token!r}")
            if vocab_size is not None and token >= vocab_size:
                raise DraftError(f"tokens[{index}] = {token} is outside the vocabulary of {vocab_size}")
            if type(parent) is not int or not -1 <= parent < index:
                raise DraftError(f"parents[{index}] = {parent!r} must be between -1 and {index - 1}")
        for index, log_prob in enumerate(self.log_probs):
            if not log_prob <= _LOG_PROB_SLACK:  # also true for NaN
                raise DraftError(f"log_probs[{index}] = {log_prob!r} is not a log-probability")
        for index, confidence in enumerate(self.confidences):
            if not 0.0 <= confidence <= 1.0:
                raise DraftError(f"confidences[{index}] = {confidence!r} is not a probability")
        for index, draws in enumerate(self.draft_dists or ()):
            if draws is not None and draws.confidence is not None and not 0.0 <= draws.confidence <= 1.0:
                raise DraftError(
                    f"draft_dists[{index}].confidence = {draws.confidence!r} is not a probability"
                )

    def claims(self) -> list[DraftClaim | None]:
        """What the drafter said about each token; None where it said nothing.

        For a token that was not drawn, that is its log-probability. For the first of drawn siblings, it is the
        confidence stated before the draw. The other drawn siblings have no claim: they are tried only after the first
        was rejected.
        """
        positions: list[int] = []
        for parent in self.parents:
            # The entry may not have been checked yet, so that a parent can have any value.
            positions.append(positions[parent] + 1 if 0 <= parent < len(positions) else 0)
        claims: list[DraftClaim | None] = []
        for index, (token, position) in enumerate(zip(self.tokens, positions, strict=True)):
            draws = self.draft_dists[index] if self.draft_dists else None
            if draws is None:
                log_prob = min(self.log_probs[index], 0.0) if self.log_probs else None
            elif draws.confidence is not None and token == draws.tokens[0]:
                log_prob = math.log(max(draws.confidence, _LEAST_CONFIDENCE))
            else:
                log_prob = None
            claims.append(None if log_prob is None else DraftClaim(log_prob, position))
        return claims

    def usable_confidences(self) -> list[float | None]:
        """Each token's confidence; None where the drafter stated nothing, or nothing before the draw."""
        found: list[float | None]
        if self.confidences:
            found = [float(confidence) for confidence in self.confidences]
        elif self.log_probs:
            found = [math.exp(min(log_prob, 0.0)) for log_prob in self.log_probs]
        else:
            found = [None] * len(self.tokens)
        for index, draws in enumerate(self.draft_dists or ()):
            if draws is not None and (draws.confidence is None or not self.confidences):
                found[index] = draws.confidence
        return found


class DraftClaim(NamedTuple):
    """What a drafter said about a token, before calibration.

    Attributes:
        log_prob: log-probability of the token given its path, or the logarithm of its stated confidence.
        position: the token's depth in the entry that proposed it, from 0.
    """

    log_prob: float
    position: int
