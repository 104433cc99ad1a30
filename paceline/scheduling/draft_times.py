"""Measured draft time over the tokens drafted in a row and the sequences drafted for.

Responsible for: a robust linear model of the time of a draft round.

Deliberately does not know: clocks, which drafter was measured.

Called by: the scheduler service (observe), the planner's inputs (read).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from paceline.scheduling.robust import nonnegative_fit, weighted_median


class DraftCoefficients(NamedTuple):
    """A round of k tokens for each of n sequences takes base + per_token k + (per_sequence + per_both k) (n - 1)."""

    base_s: float
    per_token_s: float
    per_sequence_s: float
    per_both_s: float


class _Draft(NamedTuple):
    born: int
    num_tokens: int
    num_sequences: int
    seconds: float


class DraftTimeModel:
    """Draft time over the tokens drafted in a row and the sequences drafted for; it grows in both.

    No coefficient is negative, and outliers do not move any (`robust.nonnegative_fit`). Until rounds of two
    different lengths have been seen, the guess per token applies, for at most half of a round's time; the base
    takes the rest. Until rounds of two numbers of sequences have been seen, further sequences are assumed to
    cost nothing.

    Args:
        half_life: observations after which an old one counts half.
        base_s: guess before anything is measured.
        per_token_s: guess before anything is measured.
        max_samples: observations kept.
    """

    def __init__(
        self,
        half_life: float = 64.0,
        base_s: float = 0.0,
        per_token_s: float = 0.001,
        max_samples: int = 512,
    ) -> None:
        if not half_life > 0 or not base_s >= 0 or not per_token_s >= 0 or max_samples < 1:
            raise ValueError(
                "half_life must be above 0, base_s and per_token_s not negative, max_samples at least 1"
            )
        self._half_life = half_life
        self._guess = DraftCoefficients(base_s, per_token_s, 0.0, 0.0)
        self._samples: deque[_Draft] = deque(maxlen=max_samples)
        self._clock = 0
        self._fitted: tuple[DraftCoefficients, float] | None = None

    @classmethod
    def fit(cls, samples: Iterable[tuple[int, float, int]]) -> DraftTimeModel:
        """From (tokens, seconds, sequences), all of one weight."""
        kept = list(samples)
        model = cls(half_life=math.inf, max_samples=max(len(kept), 1))
        for num_tokens, seconds, num_sequences in kept:
            model.observe(num_tokens, seconds, num_sequences)
        return model

    def observe(self, num_tokens: int, seconds: float, num_sequences: int = 1) -> None:
        """Add one measured round of ``num_tokens`` tokens in a row for each of ``num_sequences`` sequences."""
        if num_tokens < 1 or num_sequences < 1 or not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(
                f"not a draft round: {num_tokens} tokens for {num_sequences} sequences in {seconds!r} s"
            )
        self._clock += 1
        self._samples.append(_Draft(self._clock, num_tokens, num_sequences, seconds))
        self._fitted = None

    @property
    def coefficients(self) -> DraftCoefficients:
        """The terms of the draft time; none is negative."""
        return self._fit()[0]

    def seconds(self, num_tokens: int, num_sequences: int | None = None) -> float:
        """Expected time to draft ``num_tokens`` tokens in a row; 0 for none.

        Args:
            num_tokens: draft steps.
            num_sequences: sequences drafted for together; None for as many as in the measured rounds.
        """
        if num_tokens <= 0:
            return 0.0
        (base_s, per_token_s, per_sequence_s, per_both_s), typical = self._fit()
        others = (typical if num_sequences is None else num_sequences) - 1
        return base_s + per_token_s * num_tokens + (per_sequence_s + per_both_s * num_tokens) * others

    __call__ = seconds

    def _fit(self) -> tuple[DraftCoefficients, float]:
        """The coefficients, and the median number of sequences."""
        if self._fitted is None:
            if not self._samples:
                return self._guess, 1.0
            weights = [2.0 ** ((s.born - self._clock) / self._half_life) for s in self._samples]
            seconds = [s.seconds for s in self._samples]
            # Rounds of one length do not show what grows with the length. The guess takes half of the time at
            # most: otherwise short drafts would look too cheap.
            most_s = weighted_median([s.seconds / s.num_tokens for s in self._samples], weights)
            coefficients = nonnegative_fit(
                [
                    (1.0, s.num_tokens, s.num_sequences - 1.0, s.num_tokens * (s.num_sequences - 1.0))
                    for s in self._samples
                ],
                seconds,
                weights,
                (None, min(self._guess.per_token_s, most_s / 2), 0.0, 0.0),
            )
            typical = weighted_median([float(s.num_sequences) for s in self._samples], weights)
            self._fitted = DraftCoefficients(*coefficients), typical
        return self._fitted
