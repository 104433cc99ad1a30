"""Measured cost of a target step over the rows it runs.

Responsible for: turning noisy samples (rows, seconds) into a monotone curve, refining it online, and
(de)serialising it.

Deliberately does not know: where samples come from, where the curve is stored, what is decided with it.

Called by: the verifier (observe, evaluate), the scheduler service (store), the planner (evaluate).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping
from typing import Any

SCHEMA_VERSION = 1
_EXACT_ROWS = 32  # below, every row count is its own bucket; above, buckets grow by a fixed ratio
_BUCKET_RATIO = 2**0.25


def bucket_of(rows: int) -> int:
    """The row count that stands for ``rows`` in a curve."""
    if rows <= _EXACT_ROWS:
        return rows
    return round(_EXACT_ROWS * _BUCKET_RATIO ** round(math.log(rows / _EXACT_ROWS, _BUCKET_RATIO)))


class StepCurve:
    """Step time over rows: robust median per bucket, made monotone, linear in between.

    A bucket keeps its newest samples; an old sample's weight halves every ``half_life`` newer samples of the
    curve, so a machine that slows down is noticed while a single slow step (a page fault, a neighbour) moves
    no median.

    Args:
        max_samples: samples kept per bucket.
        half_life: samples after which an old one counts half.
    """

    def __init__(self, max_samples: int = 32, half_life: float = 64.0) -> None:
        if max_samples < 1 or not half_life > 0:
            raise ValueError("max_samples must be at least 1 and half_life above 0")
        self._max_samples = max_samples
        self._half_life = half_life
        self._buckets: dict[int, list[tuple[int, float]]] = {}  # bucket -> [(when, seconds)], oldest first
        self._clock = 0
        self._knots: tuple[list[int], list[float]] | None = None

    @classmethod
    def fit(
        cls, samples: Iterable[tuple[int, float]], max_samples: int = 32, half_life: float = 64.0
    ) -> StepCurve:
        """A curve from samples of (rows, seconds), as a profiling run makes them; all weigh the same."""
        curve = cls(max_samples, half_life)
        for rows, seconds in samples:
            curve.observe(rows, seconds)
        for bucket, entries in curve._buckets.items():
            curve._buckets[bucket] = [(curve._clock, seconds) for _, seconds in entries]
        return curve

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been observed."""
        return not self._buckets

    def observe(self, rows: int, seconds: float) -> None:
        """Add one measured step. Samples that cannot be measurements raise."""
        if rows < 1 or not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"not a step: {rows} rows in {seconds!r} s")
        self._clock += 1
        entries = self._buckets.setdefault(bucket_of(rows), [])
        entries.append((self._clock, seconds))
        if len(entries) > self._max_samples:
            del entries[0]
        self._knots = None

    def seconds(self, rows: int) -> float:
        """Expected seconds of a step over ``rows`` rows.

        Beyond the largest measured bucket the last slope goes on, and at least in proportion to nothing:
        never falling.

        Raises:
            ValueError: nothing has been observed.
        """
        xs, ys = self._fitted()
        if rows <= xs[0]:
            return ys[0]
        right = bisect.bisect_left(xs, rows)
        if right == len(xs):
            if len(xs) == 1:
                return ys[0] * rows / xs[0]  # one point tells no slope: assume the worst
            right -= 1
        left = right - 1
        slope = (ys[right] - ys[left]) / (xs[right] - xs[left])
        if rows > xs[-1]:
            # A flat last piece says little about what lies beyond; the mean slope is the safer guess.
            slope = max(slope, (ys[-1] - ys[0]) / (xs[-1] - xs[0]))
            return ys[-1] + slope * (rows - xs[-1])
        return ys[left] + slope * (rows - xs[left])

    __call__ = seconds

    def to_dict(self) -> dict[str, Any]:
        """A JSON value. Samples become their bucket's median and count, which is all a fresh process needs."""
        buckets = [
            {"rows": bucket, "seconds": self._median(entries), "count": len(entries)}
            for bucket, entries in sorted(self._buckets.items())
        ]
        return {"schema_version": SCHEMA_VERSION, "buckets": buckets}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any], max_samples: int = 32, half_life: float = 64.0) -> StepCurve:
        """Read `to_dict`'s value back.

        Raises:
            ValueError: another schema version, or numbers that are no measurements.
        """
        if value.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(
                f"step curve of schema version {value.get('schema_version')!r}, not {SCHEMA_VERSION}"
            )
        samples: list[tuple[int, float]] = []
        for bucket in value["buckets"]:
            count = min(max(int(bucket["count"]), 1), max_samples)
            samples.extend([(int(bucket["rows"]), float(bucket["seconds"]))] * count)
        return cls.fit(samples, max_samples, half_life)

    def _fitted(self) -> tuple[list[int], list[float]]:
        """Bucket row counts and their fitted seconds, not falling."""
        if self._knots is None:
            if not self._buckets:
                raise ValueError("the step curve is empty")
            xs = sorted(self._buckets)
            medians = [self._median(self._buckets[x]) for x in xs]
            weights = [sum(self._weight(when) for when, _ in self._buckets[x]) for x in xs]
            self._knots = (xs, isotonic(medians, weights))
        return self._knots

    def _weight(self, when: int) -> float:
        return float(2.0 ** ((when - self._clock) / self._half_life))

    def _median(self, entries: list[tuple[int, float]]) -> float:
        """Weighted median: newer samples weigh more."""
        ranked = sorted((seconds, self._weight(when)) for when, seconds in entries)
        half = sum(weight for _, weight in ranked) / 2
        reached = 0.0
        for seconds, weight in ranked:
            reached += weight
            if reached >= half:
                return seconds
        return ranked[-1][0]


def isotonic(values: list[float], weights: list[float]) -> list[float]:
    """The non-decreasing sequence closest in weighted squares, by pooling adjacent violators."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        block = (value, max(weight, 1e-12), 1)
        while blocks and blocks[-1][0] > block[0]:
            mean, total, length = blocks.pop()
            joint = total + block[1]
            block = ((mean * total + block[0] * block[1]) / joint, joint, length + block[2])
        blocks.append(block)
    return [mean for mean, _, length in blocks for _ in range(length)]
