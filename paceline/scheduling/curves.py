"""Measured cost of a target step over the rows it runs, its sequences and the context they attend to.

Responsible for: turning noisy samples (rows, seconds, sequences, context tokens) into a monotone curve with a linear
term for each context token and each sequence, refining it online, noticing a machine that became slower or faster, and
(de)serialising it.

Deliberately does not know: where samples come from, where the curve is stored, what is decided with it.

Called by: the verifier (observe, evaluate), the scheduler service (store), the planner (evaluate).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from paceline.scheduling.robust import (
    MIN_SHIFT,
    Shift,
    find_shift,
    nonnegative_fit,
    shrunken,
    weighted_median,
)

SCHEMA_VERSION = 2
_EXACT_ROWS = 32  # below, every row count is its own bucket; above, buckets grow by a fixed ratio
_BUCKET_RATIO = 2**0.25
_STALE_WEIGHT = 1 / 16  # of samples from before the machine changed, over those since
_NUM_ROUNDS = 3  # of levels and slopes in turn
_MIN_BASE = 0.05  # of a bucket's median: what the linear terms leave, however the fit came out


def bucket_of(rows: int) -> int:
    """The row count that stands for ``rows`` in a curve."""
    if rows <= _EXACT_ROWS:
        return rows
    return round(_EXACT_ROWS * _BUCKET_RATIO ** round(math.log(rows / _EXACT_ROWS, _BUCKET_RATIO)))


class _Sample(NamedTuple):
    """One step. ``order`` counts samples; ``born`` is what its weight decays from."""

    order: int
    born: int
    seconds: float
    sequences: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class _Fit:
    """Knots at the buckets' row counts, neither of them falling.

    Attributes:
        xs: row counts.
        typical_s: seconds as measured, at the sequences and context that were measured with those rows.
        base_s: seconds less the linear terms.
        per_context_token_s, per_sequence_s: the linear terms.
        shift: the last change of the machine, None where none stands out.
    """

    xs: list[int]
    typical_s: list[float]
    base_s: list[float]
    per_context_token_s: float
    per_sequence_s: float
    shift: Shift | None


class StepCurve:
    """Step time over rows: robust median per bucket, made monotone, linear in between; over context and sequences
    linear.

    A bucket keeps its newest samples; an old sample's weight halves every ``half_life`` newer samples of the
    curve, while a single slow step (a page fault, a neighbour) moves no median. Where the newest samples of all buckets
    took longer (or less long) by one factor (`robust.find_shift`), older ones are scaled by it and lose nearly all
    their weight: the shape is kept until it has been measured anew.

    The linear terms come from differences within buckets (`robust.nonnegative_fit`). Rows, sequences and context
    grow together in a real load, and only steps that agree in rows tell the others apart.

    Args:
        max_samples: samples kept per bucket.
        half_life: samples after which an old one counts half.
    """

    def __init__(self, max_samples: int = 32, half_life: float = 64.0) -> None:
        if max_samples < 1 or not half_life > 0:
            raise ValueError("max_samples must be at least 1 and half_life above 0")
        self._max_samples = max_samples
        self._half_life = half_life
        self._buckets: dict[int, list[_Sample]] = {}  # oldest first
        self._clock = 0
        self._fit: _Fit | None = None

    @classmethod
    def fit(
        cls,
        samples: Iterable[tuple[int, float] | tuple[int, float, int, int]],
        max_samples: int = 32,
        half_life: float = 64.0,
    ) -> StepCurve:
        """A curve from samples of (rows, seconds) or (rows, seconds, sequences, context tokens), oldest first.

        All weigh the same, but for those from before the machine changed.
        """
        curve = cls(max_samples, half_life)
        for sample in samples:
            curve.observe(*sample)
        for bucket, entries in curve._buckets.items():
            curve._buckets[bucket] = [entry._replace(born=curve._clock) for entry in entries]
        return curve

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been observed."""
        return not self._buckets

    def observe(self, rows: int, seconds: float, sequences: int = 1, context_tokens: int = 0) -> None:
        """Add one measured step. Samples that cannot be measurements raise."""
        if rows < 1 or not (math.isfinite(seconds) and seconds > 0) or sequences < 0 or context_tokens < 0:
            raise ValueError(
                f"not a step: {rows} rows of {sequences} sequences over {context_tokens} tokens in {seconds!r} s"
            )
        self._clock += 1
        entries = self._buckets.setdefault(bucket_of(rows), [])
        entries.append(_Sample(self._clock, self._clock, seconds, sequences, context_tokens))
        if len(entries) > self._max_samples:
            del entries[0]
        self._fit = None

    def seconds(self, rows: int, sequences: int | None = None, context_tokens: int | None = None) -> float:
        """Expected seconds of a step.

        Beyond the largest measured bucket the last slope goes on, and at least in proportion to nothing:
        never falling.

        Args:
            rows: rows of the step.
            sequences, context_tokens: of the step; where either is None, as they were in the steps that were measured
                with that many rows.

        Raises:
            ValueError: nothing has been observed.
        """
        fit = self._fitted()
        if sequences is None or context_tokens is None:
            return _interpolated(fit.xs, fit.typical_s, rows)
        base_s = _interpolated(fit.xs, fit.base_s, rows)
        return base_s + fit.per_sequence_s * sequences + fit.per_context_token_s * context_tokens

    __call__ = seconds

    @property
    def per_context_token_s(self) -> float:
        """Seconds for each further token of context in a step of given rows; 0 where unknown."""
        return self._fitted().per_context_token_s

    @property
    def per_sequence_s(self) -> float:
        """Seconds for each further sequence in a step of given rows; 0 where unknown."""
        return self._fitted().per_sequence_s

    @property
    def shift(self) -> Shift | None:
        """The last change of the machine among the samples kept, None where none stands out."""
        return self._fitted().shift

    def to_dict(self) -> dict[str, Any]:
        """A JSON value: the samples kept, oldest first, as [rows, seconds, sequences, context tokens]."""
        samples = sorted((entry, bucket) for bucket, entries in self._buckets.items() for entry in entries)
        return {
            "schema_version": SCHEMA_VERSION,
            "samples": [[bucket, s.seconds, s.sequences, s.context_tokens] for s, bucket in samples],
        }

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
        samples = [
            (int(rows), float(seconds), int(sequences), int(context))
            for rows, seconds, sequences, context in value["samples"]
        ]
        return cls.fit(samples, max_samples, half_life)

    def _fitted(self) -> _Fit:
        if self._fit is None:
            if not self._buckets:
                raise ValueError("the step curve is empty")
            self._fit = self._make_fit()
        return self._fit

    def _make_fit(self) -> _Fit:
        fit = self._fit_since(None, 0, 1.0)
        in_order = sorted((s, bucket) for bucket, entries in self._buckets.items() for s in entries)
        groups = [bucket for _, bucket in in_order]
        # What context and sequences explain is taken out first: a text that grows is no slower machine.
        shift = find_shift(groups, self._ratios(in_order, fit))
        if shift is None:
            return fit
        changed_at = in_order[shift.start][0].order
        before = self._fit_since(None, changed_at, 1.0, fresh_weight=0.0)
        known = set(groups[: shift.start])
        ratios = [
            ratio
            for ratio, bucket in zip(
                self._ratios(in_order[shift.start :], before), groups[shift.start :], strict=True
            )
            if bucket in known
        ]
        shift = replace(shift, factor=weighted_median(ratios, [1.0] * len(ratios)))
        if abs(math.log(shift.factor)) < MIN_SHIFT:
            return fit
        return self._fit_since(shift, changed_at, shift.factor)

    @staticmethod
    def _ratios(samples: Iterable[tuple[_Sample, int]], fit: _Fit) -> list[float]:
        """Measured over expected seconds."""
        base_s = dict(zip(fit.xs, fit.base_s, strict=True))
        return [
            s.seconds
            / (base_s[bucket] + fit.per_context_token_s * s.context_tokens + fit.per_sequence_s * s.sequences)
            for s, bucket in samples
        ]

    def _fit_since(
        self, shift: Shift | None, changed_at: int, factor: float, fresh_weight: float = 1.0
    ) -> _Fit:
        """The fit in which samples of an order below ``changed_at`` are scaled by ``factor`` and weigh little."""
        xs = sorted(self._buckets)
        seconds: dict[int, list[float]] = {}
        weights: dict[int, list[float]] = {}
        for x in xs:
            entries = self._buckets[x]
            is_stale = [s.order < changed_at for s in entries]
            seconds[x] = [
                s.seconds * (factor if stale else 1.0) for s, stale in zip(entries, is_stale, strict=True)
            ]
            weights[x] = [
                self._weight(s.born) * (_STALE_WEIGHT if stale else fresh_weight)
                for s, stale in zip(entries, is_stale, strict=True)
            ]
        totals = [sum(weights[x]) for x in xs]
        typical = [weighted_median(seconds[x], weights[x]) for x in xs]
        per_context, per_sequence = self._slopes(xs, seconds, weights)
        base = []
        for x, median in zip(xs, typical, strict=True):
            rest = [
                t - per_context * s.context_tokens - per_sequence * s.sequences
                for t, s in zip(seconds[x], self._buckets[x], strict=True)
            ]
            base.append(max(weighted_median(rest, weights[x]), _MIN_BASE * median))
        return _Fit(xs, isotonic(typical, totals), isotonic(base, totals), per_context, per_sequence, shift)

    def _slopes(
        self, xs: list[int], seconds: dict[int, list[float]], weights: dict[int, list[float]]
    ) -> tuple[float, float]:
        """(seconds per context token, seconds per sequence), from deviations within buckets.

        A bucket's own level and the slopes are fitted in turn, each robustly.
        """
        features: list[tuple[float, float]] = []
        targets: list[float] = []
        flat_weights: list[float] = []
        spans: list[slice] = []
        for x in xs:
            entries = self._buckets[x]
            context = sum(s.context_tokens for s in entries) / len(entries)
            sequences = sum(s.sequences for s in entries) / len(entries)
            spans.append(slice(len(targets), len(targets) + len(entries)))
            features.extend((s.context_tokens - context, s.sequences - sequences) for s in entries)
            targets.extend(seconds[x])
            flat_weights.extend(weights[x])
        slopes = (0.0, 0.0)
        if not any(c or n for c, n in features):
            return slopes
        for _ in range(_NUM_ROUNDS):
            left = [t - slopes[0] * c - slopes[1] * n for t, (c, n) in zip(targets, features, strict=True)]
            deviations: list[float] = []
            for span in spans:
                level = weighted_median(left[span], flat_weights[span])
                deviations.extend(t - level for t in targets[span])
            per_context, per_sequence = nonnegative_fit(features, deviations, flat_weights, (0.0, 0.0))
            slopes = per_context, per_sequence
        per_context, per_sequence = shrunken(features, deviations, flat_weights, slopes)
        return per_context, per_sequence

    def _weight(self, when: int) -> float:
        return float(2.0 ** ((when - self._clock) / self._half_life))


def _interpolated(xs: list[int], ys: list[float], rows: int) -> float:
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
