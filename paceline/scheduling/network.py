"""Measured durations: round trips, queue waits, draft times.

Responsible for: means and quantiles of a duration, and draft time as a line over the number of tokens
drafted.

Deliberately does not know: sockets, clocks, who measured.

Called by: the conductor and the drafter (observe), the scheduler service (store), the planner's callers
(read).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

SCHEMA_VERSION = 1


class DurationEstimator:
    """Decayed mean and recent quantiles of one duration.

    Args:
        half_life: observations after which an old one counts half in the mean.
        window: how many recent observations the quantiles look at.
    """

    def __init__(self, half_life: float = 32.0, window: int = 128) -> None:
        if not half_life > 0 or window < 1:
            raise ValueError("half_life must be above 0 and window at least 1")
        self._decay = 2.0 ** (-1.0 / half_life)
        self._recent: deque[float] = deque(maxlen=window)
        self._sum = 0.0
        self._weight = 0.0
        self._count = 0

    def observe(self, seconds: float) -> None:
        """Add one measurement."""
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"not a duration: {seconds!r} s")
        self._recent.append(seconds)
        self._sum = self._sum * self._decay + seconds
        self._weight = self._weight * self._decay + 1.0
        self._count += 1

    @property
    def count(self) -> int:
        """Measurements so far."""
        return self._count

    @property
    def mean_s(self) -> float:
        """Decayed mean; 0 before the first measurement."""
        return self._sum / self._weight if self._weight else 0.0

    @property
    def p50_s(self) -> float:
        """Median of the window."""
        return self.quantile(0.5)

    @property
    def p95_s(self) -> float:
        """95th percentile of the window."""
        return self.quantile(0.95)

    def quantile(self, fraction: float) -> float:
        """The smallest recent measurement that at least ``fraction`` of them do not exceed; 0 without any."""
        if not self._recent:
            return 0.0
        ranked = sorted(self._recent)
        return ranked[max(0, math.ceil(fraction * len(ranked)) - 1)]

    def to_dict(self) -> dict[str, Any]:
        """A JSON value."""
        return {"schema_version": SCHEMA_VERSION, "recent": list(self._recent), "count": self._count}

    @classmethod
    def from_dict(
        cls, value: Mapping[str, Any], half_life: float = 32.0, window: int = 128
    ) -> DurationEstimator:
        """Read `to_dict`'s value back; the mean is rebuilt from the recent measurements.

        Raises:
            ValueError: another schema version, or numbers that are no durations.
        """
        _check_version(value)
        estimator = cls(half_life, window)
        for seconds in value["recent"]:
            estimator.observe(float(seconds))
        estimator._count = max(int(value["count"]), estimator._count)
        return estimator


class DraftTimeModel:
    """Draft time as base + per_token * tokens, a decayed least-squares line.

    Before two different lengths have been seen, the per-token guess holds and the base absorbs the rest.

    Args:
        half_life: observations after which an old one counts half.
        base_s: guess before anything is known.
        per_token_s: guess before anything is known.
    """

    def __init__(self, half_life: float = 64.0, base_s: float = 0.0, per_token_s: float = 0.001) -> None:
        if not half_life > 0 or not base_s >= 0 or not per_token_s >= 0:
            raise ValueError("half_life must be above 0, base_s and per_token_s not negative")
        self._decay = 2.0 ** (-1.0 / half_life)
        self._base_s = base_s
        self._per_token_s = per_token_s
        # Decayed sums of 1, k, k*k, t, k*t.
        self._sums = [0.0] * 5

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Add one measured draft of ``num_tokens`` tokens."""
        if num_tokens < 1 or not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"not a draft: {num_tokens} tokens in {seconds!r} s")
        terms = (1.0, num_tokens, num_tokens * num_tokens, seconds, num_tokens * seconds)
        self._sums = [total * self._decay + term for total, term in zip(self._sums, terms, strict=True)]

    @property
    def coefficients(self) -> tuple[float, float]:
        """(base seconds, seconds per token), neither negative."""
        weight, sum_k, sum_kk, sum_t, sum_kt = self._sums
        if not weight:
            return self._base_s, self._per_token_s
        mean_k, mean_t = sum_k / weight, sum_t / weight
        variance = sum_kk / weight - mean_k * mean_k
        covariance = sum_kt / weight - mean_k * mean_t
        slope = covariance / variance if variance > 1e-6 else self._per_token_s
        slope = min(max(slope, 0.0), mean_t / mean_k)  # the largest slope a non-negative base allows
        return max(mean_t - slope * mean_k, 0.0), slope

    def seconds(self, num_tokens: int) -> float:
        """Expected time to draft ``num_tokens`` tokens; nothing for none."""
        if num_tokens <= 0:
            return 0.0
        base, slope = self.coefficients
        return base + slope * num_tokens

    __call__ = seconds

    def to_dict(self) -> dict[str, Any]:
        """A JSON value."""
        return {"schema_version": SCHEMA_VERSION, "sums": list(self._sums)}

    @classmethod
    def from_dict(
        cls,
        value: Mapping[str, Any],
        half_life: float = 64.0,
        base_s: float = 0.0,
        per_token_s: float = 0.001,
    ) -> DraftTimeModel:
        """Read `to_dict`'s value back.

        Raises:
            ValueError: another schema version, or sums that cannot be.
        """
        _check_version(value)
        sums = [float(total) for total in value["sums"]]
        if len(sums) != 5 or not all(math.isfinite(total) and total >= 0 for total in sums):
            raise ValueError("draft time sums that cannot be")
        model = cls(half_life, base_s, per_token_s)
        model._sums = sums
        return model


def _check_version(value: Mapping[str, Any]) -> None:
    if value.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"durations of schema version {value.get('schema_version')!r}, not {SCHEMA_VERSION}")
