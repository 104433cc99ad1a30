"""The fit behind a step curve: a level for each number of rows, and linear terms for context and sequences.

Responsible for: robust levels and slopes, noticing that the machine became slower or faster, and interpolation.

Deliberately does not know: how samples are collected, stored or forgotten.

Called by: `curves.StepCurve`.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from paceline.scheduling.robust import (
    MIN_SHIFT,
    Shift,
    find_shift,
    nonnegative_fit,
    shrunken,
    weighted_median,
)

_STALE_WEIGHT = 1 / 16  # of samples from before the machine changed, over samples since
_NUM_ROUNDS = 3  # in which levels and slopes are fitted in turn
_MIN_BASE = 0.05  # of a bucket's median: what the linear terms leave at least, whatever the fit says


class StepSample(NamedTuple):
    """One measured step.

    Attributes:
        order: the sample's number, rising with every sample of the curve.
        born: the sample number that its weight decays from.
        seconds: measured time.
        sequences: sequences in the step.
        context_tokens: tokens of context that the step attended to.
    """

    order: int
    born: int
    seconds: float
    sequences: int
    context_tokens: int


Buckets = Mapping[int, Sequence[StepSample]]
"""Samples by rows, the oldest first."""


@dataclass(frozen=True, slots=True)
class CurveFit:
    """Knots at the buckets' row counts; both curves are non-decreasing.

    Attributes:
        xs: row counts.
        typical_s: seconds as measured, at the sequences and the context that were measured with those rows.
        base_s: seconds without the linear terms.
        per_context_token_s, per_sequence_s: the linear terms.
        shift: the last change of the machine, None where none stands out.
    """

    xs: list[int]
    typical_s: list[float]
    base_s: list[float]
    per_context_token_s: float
    per_sequence_s: float
    shift: Shift | None

    def typical(self, rows: int) -> float:
        """Seconds at the sequences and the context that were measured with that many rows."""
        return _interpolated(self.xs, self.typical_s, rows)

    def seconds(self, rows: int, sequences: int, context_tokens: int) -> float:
        """Seconds of a step of that size."""
        base_s = _interpolated(self.xs, self.base_s, rows)
        return base_s + self.per_sequence_s * sequences + self.per_context_token_s * context_tokens


def fit_curve(buckets: Buckets, clock: int, half_life: float) -> CurveFit:
    """Fit a curve, and correct samples from before the machine became slower or faster.

    Args:
        buckets: samples by rows; at least one.
        clock: the number of the newest sample.
        half_life: samples after which an old one counts half.
    """
    aged = _AgedSamples(buckets, clock, half_life)
    fit = aged.fit(None, 0, 1.0)
    in_order = sorted((s, bucket) for bucket, entries in buckets.items() for s in entries)
    groups = [bucket for _, bucket in in_order]
    # The linear terms are taken out first: a text that grows does not mean a slower machine.
    shift = find_shift(groups, _ratios(in_order, fit))
    if shift is None:
        return fit
    changed_at = in_order[shift.start][0].order
    before = aged.fit(None, changed_at, 1.0, fresh_weight=0.0)
    known = set(groups[: shift.start])
    ratios = [
        ratio
        for ratio, bucket in zip(_ratios(in_order[shift.start :], before), groups[shift.start :], strict=True)
        if bucket in known
    ]
    shift = replace(shift, factor=weighted_median(ratios, [1.0] * len(ratios)))
    if abs(math.log(shift.factor)) < MIN_SHIFT:
        return fit
    return aged.fit(shift, changed_at, shift.factor)


def _ratios(samples: Iterable[tuple[StepSample, int]], fit: CurveFit) -> list[float]:
    """Measured over expected seconds."""
    base_s = dict(zip(fit.xs, fit.base_s, strict=True))
    return [
        s.seconds
        / (base_s[bucket] + fit.per_context_token_s * s.context_tokens + fit.per_sequence_s * s.sequences)
        for s, bucket in samples
    ]


class _AgedSamples:
    """Samples whose weights decay with the samples that came after them."""

    def __init__(self, buckets: Buckets, clock: int, half_life: float) -> None:
        self._buckets = buckets
        self._clock = clock
        self._half_life = half_life

    def fit(self, shift: Shift | None, changed_at: int, factor: float, fresh_weight: float = 1.0) -> CurveFit:
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
        return CurveFit(
            xs, isotonic(typical, totals), isotonic(base, totals), per_context, per_sequence, shift
        )

    def _slopes(
        self, xs: list[int], seconds: dict[int, list[float]], weights: dict[int, list[float]]
    ) -> tuple[float, float]:
        """(seconds per context token, seconds per sequence), from deviations within buckets.

        The level of each bucket and the slopes are fitted in turn, each robustly.
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
            return ys[0] * rows / xs[0]  # one point gives no slope: assume the worst case
        right -= 1
    left = right - 1
    slope = (ys[right] - ys[left]) / (xs[right] - xs[left])
    if rows > xs[-1]:
        # A flat last piece says little about larger steps; the mean slope is the safer guess.
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
