"""Distributions of measured durations, such as round trips and queue waits.

Responsible for: means and quantiles of a duration, as a bounded sketch that can be merged.

Deliberately does not know: sockets, clocks, which peer measured.

Called by: the scheduler service (collects and stores sketches), the planner's inputs (read means and quantiles).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

_SKETCH_RATIO = 2**0.125  # a quantile is off by at most 4.5%
_SKETCH_MAX_BUCKET = 234  # 600 s; the first bucket counts all durations below 1 us
_SKETCH_HALF_LIFE = 32.0  # a link that becomes slow or fast again must show within a second or two
_FORGOTTEN = 1e-3  # a bucket of less weight is dropped, so that old extremes disappear


@dataclass(frozen=True, slots=True)
class DurationSketch:
    """A distribution of durations as decayed counts over fixed logarithmic buckets. Sketches can be merged.

    Bucket 0 counts durations below 1 us. Bucket i counts those from ratio^(i-1) to ratio^i us, with eight
    buckets to a factor of two (as DDSketch, Masson et al., 2019, with fixed ends). A sketch never has more than
    235 buckets.

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
            ValueError: a duration is negative or not finite.
        """
        buckets: dict[int, float] = {}
        count, total = 0, 0.0
        for duration in seconds:
            if not (math.isfinite(duration) and duration >= 0):
                raise ValueError(f"not a duration: {duration!r} s; it must be finite and not negative")
            bucket = sketch_bucket(duration)
            buckets[bucket] = buckets.get(bucket, 0.0) + 1.0
            count += 1
            total += duration
        return cls(count, buckets, total)

    def merged(self, newer: DurationSketch) -> DurationSketch:
        """This sketch with newer durations added: its own weights halve for every 32 of them."""
        fade = 2.0 ** (-newer.count / _SKETCH_HALF_LIFE)
        faded = {bucket: weight * fade for bucket, weight in self.buckets.items()}
        kept = {bucket: weight for bucket, weight in faded.items() if weight >= _FORGOTTEN}
        return DurationSketch(
            self.count + newer.count, _summed(kept, newer.buckets), self.sum_s * fade + newer.sum_s
        )

    def joined(self, other: DurationSketch) -> DurationSketch:
        """Both sketches together, neither of them older: several peers taken as one."""
        return DurationSketch(
            self.count + other.count, _summed(self.buckets, other.buckets), self.sum_s + other.sum_s
        )

    @property
    def weight(self) -> float:
        """Decayed number of durations."""
        return math.fsum(self.buckets.values())

    @property
    def mean_s(self) -> float:
        """Decayed mean; 0 without any duration."""
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
        """The duration that ``fraction`` of the weight does not exceed, linear within its bucket; 0 without any
        duration.
        """
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
        """A JSON value. Its mean and quantiles are for people and are not read back."""
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
            ValueError: a number is out of range.
        """
        buckets: dict[int, float] = {}
        if not isinstance(value["buckets"], dict):
            raise ValueError("buckets must be an object")
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
    """Whether a value is a number from 0 to a limit. NaN and booleans are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= limit
