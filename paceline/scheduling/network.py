"""Measured durations: round trips, queue waits, draft times.

Responsible for: means and quantiles of a duration, as a bounded sketch that merges, and draft time over the tokens
drafted and the sequences drafted for.

Deliberately does not know: sockets, clocks, who measured.

Called by: the conductor and the drafter (observe), the scheduler service (store), the planner's callers
(read).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.scheduling.robust import nonnegative_fit, weighted_median

SCHEMA_VERSION = 1


_SKETCH_RATIO = 2**0.125  # a quantile is off by at most 4.5%
_SKETCH_MAX_BUCKET = 234  # 600 s; the first bucket holds all below 1 us
_SKETCH_HALF_LIFE = 32.0  # a link that becomes slow or fast again is to be noticed within a second or two
_FORGOTTEN = 1e-3  # a bucket that weighs less is dropped, so that old extremes do not stay for ever


@dataclass(frozen=True, slots=True)
class DurationSketch:
    """A distribution of durations as decayed counts over fixed logarithmic buckets; sketches merge.

    Bucket 0 holds durations below 1 us, bucket i those from ratio^(i-1) to ratio^i us, with eight buckets to a factor
    of two (as DDSketch, Masson et al., 2019, with fixed ends). A sketch never holds more than 235 of them.

    Attributes:
        count: durations ever.
        buckets: decayed count by bucket.
        sum_s: decayed sum.
    """

    count: int = 0
    buckets: Mapping[int, float] = field(default_factory=dict)
    sum_s: float = 0.0

    @classmethod
    def of(cls, seconds: Iterable[float]) -> DurationSketch:
        """From durations, all of one age.

        Raises:
            ValueError: one is negative or not finite.
        """
        buckets: dict[int, float] = {}
        count, total = 0, 0.0
        for duration in seconds:
            if not (math.isfinite(duration) and duration >= 0):
                raise ValueError(f"not a duration: {duration!r} s")
            bucket = sketch_bucket(duration)
            buckets[bucket] = buckets.get(bucket, 0.0) + 1.0
            count += 1
            total += duration
        return cls(count, buckets, total)

    def merged(self, newer: DurationSketch) -> DurationSketch:
        """With newer durations after these: what is here halves for every 32 of them."""
        fade = 2.0 ** (-newer.count / _SKETCH_HALF_LIFE)
        faded = {bucket: weight * fade for bucket, weight in self.buckets.items()}
        kept = {bucket: weight for bucket, weight in faded.items() if weight >= _FORGOTTEN}
        return DurationSketch(
            self.count + newer.count, _summed(kept, newer.buckets), self.sum_s * fade + newer.sum_s
        )

    def joined(self, other: DurationSketch) -> DurationSketch:
        """Both together, neither older: to look at several peers as one."""
        return DurationSketch(
            self.count + other.count, _summed(self.buckets, other.buckets), self.sum_s + other.sum_s
        )

    @property
    def weight(self) -> float:
        """Decayed number of durations."""
        return math.fsum(self.buckets.values())

    @property
    def mean_s(self) -> float:
        """Decayed mean; 0 without any."""
        weight = self.weight
        return self.sum_s / weight if weight else 0.0

    @property
    def p50_s(self) -> float:
        """Median."""
        return self.quantile(0.5)

    @property
    def p95_s(self) -> float:
        """95th percentile."""
        return self.quantile(0.95)

    def quantile(self, fraction: float) -> float:
        """The duration that ``fraction`` of the weight does not exceed, linear within its bucket; 0 without any."""
        wanted = fraction * self.weight
        reached = 0.0
        high = 0.0
        for bucket, weight in sorted(self.buckets.items()):
            low, high = sketch_bounds(bucket)
            if reached + weight >= wanted:
                return low + (high - low) * max(wanted - reached, 0.0) / weight
            reached += weight
        return high

    def to_dict(self) -> dict[str, Any]:
        """A JSON value; mean and quantiles in it are for people, and not read back."""
        return {
            "count": self.count,
            "mean_s": self.mean_s,
            "p50_s": self.p50_s,
            "p95_s": self.p95_s,
            "sum_s": self.sum_s,
            "buckets": {str(bucket): weight for bucket, weight in sorted(self.buckets.items())},
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> DurationSketch:
        """Read `to_dict`'s value back.

        Raises:
            ValueError: a number that cannot be.
        """
        buckets: dict[int, float] = {}
        if not isinstance(value["buckets"], dict):
            raise ValueError("buckets are an object")
        for name, weight in value["buckets"].items():
            bucket = int(name)
            if not 0 <= bucket <= _SKETCH_MAX_BUCKET or not _is_within(weight, 1e15) or not weight:
                raise ValueError(f"bucket {name!r} of weight {weight!r}")
            buckets[bucket] = float(weight)
        count, sum_s = value["count"], value["sum_s"]
        if type(count) is not int or not 0 <= count < 2**53 or not _is_within(sum_s, 1e18):
            raise ValueError(f"{count!r} durations of {sum_s!r} s together")
        return cls(count, buckets, float(sum_s))


def sketch_bucket(seconds: float) -> int:
    """The bucket of a duration."""
    if seconds < 1e-6:
        return 0
    return min(1 + int(math.log(seconds * 1e6, _SKETCH_RATIO)), _SKETCH_MAX_BUCKET)


def sketch_bounds(bucket: int) -> tuple[float, float]:
    """The least and the greatest duration of a bucket, in seconds."""
    if bucket == 0:
        return 0.0, 1e-6
    return float(_SKETCH_RATIO ** (bucket - 1)) * 1e-6, float(_SKETCH_RATIO**bucket) * 1e-6


def _summed(one: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
    total = dict(one)
    for bucket, weight in other.items():
        total[bucket] = total.get(bucket, 0.0) + weight
    return total


def _is_within(value: object, limit: float) -> bool:
    """A number from 0 to a limit; NaN and booleans are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= limit


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
    """Draft time over the tokens drafted in a row and the sequences drafted for, growing in both.

    No coefficient is negative, and outliers do not move them (`robust.nonnegative_fit`). Before two different lengths
    have been seen, the per-token guess holds, but for no more than half of a round, and the base takes the rest; before
    two numbers of sequences have, more of them are taken to cost nothing.

    Args:
        half_life: observations after which an old one counts half.
        base_s: guess before anything is known.
        per_token_s: guess before anything is known.
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
                f"not a draft: {num_tokens} tokens of {num_sequences} sequences in {seconds!r} s"
            )
        self._clock += 1
        self._samples.append(_Draft(self._clock, num_tokens, num_sequences, seconds))
        self._fitted = None

    @property
    def coefficients(self) -> DraftCoefficients:
        """What draft time is made of; nothing of it is negative."""
        return self._fit()[0]

    def seconds(self, num_tokens: int, num_sequences: int | None = None) -> float:
        """Expected time to draft ``num_tokens`` tokens in a row; nothing for none.

        Args:
            num_tokens: draft steps.
            num_sequences: sequences drafted for together; None for as many as in the rounds that were measured.
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
            # Of one length alone nothing says what grows with it: half at most, or short drafts would look too cheap.
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

    def to_dict(self) -> dict[str, Any]:
        """A JSON value: the rounds kept, oldest first, as [tokens, sequences, seconds]."""
        samples = [[s.num_tokens, s.num_sequences, s.seconds] for s in self._samples]
        return {"schema_version": SCHEMA_VERSION, "samples": samples}

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
            ValueError: another schema version, or rounds that cannot be.
        """
        _check_version(value)
        model = cls(half_life, base_s, per_token_s)
        for num_tokens, num_sequences, seconds in value["samples"]:
            model.observe(int(num_tokens), float(seconds), int(num_sequences))
        return model


def _check_version(value: Mapping[str, Any]) -> None:
    if value.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"durations of schema version {value.get('schema_version')!r}, not {SCHEMA_VERSION}")
