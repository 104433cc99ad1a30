"""Measured time of a target step over its rows, its sequences and the context they attend to.

Responsible for: keeping noisy samples (rows, seconds, sequences, context tokens), and the curve fitted to
them.

Deliberately does not know: where samples come from, where the curve is stored, what is decided with it.

Called by: the verifier (observe, evaluate), the scheduler service (fit), the planner (evaluate).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from paceline.scheduling.curve_fit import CurveFit, StepSample, fit_curve
from paceline.scheduling.robust import Shift

_EXACT_ROWS = 32  # up to here every row count is its own bucket; above, buckets grow by a fixed ratio
_BUCKET_RATIO = 2**0.25


def bucket_of(rows: int) -> int:
    """The row count that stands for ``rows`` in a curve."""
    if rows <= _EXACT_ROWS:
        return rows
    return round(_EXACT_ROWS * _BUCKET_RATIO ** round(math.log(rows / _EXACT_ROWS, _BUCKET_RATIO)))


class StepCurve:
    """Step time over rows, sequences and context: a robust median per bucket of rows, made monotone, linear in
    between. It is linear over context and sequences.

    A bucket keeps its newest samples. A sample's weight halves with every ``half_life`` newer samples of the
    curve. A single slow step (a page fault, a busy neighbour) moves no median. Where the newest samples of all
    buckets took longer, or less long, by one factor (`robust.find_shift`), older samples are scaled by that
    factor and lose nearly all their weight: the shape is kept until it has been measured again.

    The linear terms come from differences within buckets (`robust.nonnegative_fit`). In a real load rows,
    sequences and context grow together, and only steps of equal rows tell the other two apart.

    Args:
        max_samples: samples kept per bucket.
        half_life: samples after which an old one counts half.
    """

    def __init__(self, max_samples: int = 32, half_life: float = 64.0) -> None:
        if max_samples < 1 or not half_life > 0:
            raise ValueError("max_samples must be at least 1 and half_life above 0")
        self._max_samples = max_samples
        self._half_life = half_life
        self._buckets: dict[int, list[StepSample]] = {}  # oldest first
        self._clock = 0
        self._fit: CurveFit | None = None

    @classmethod
    def fit(
        cls,
        samples: Iterable[tuple[int, float] | tuple[int, float, int, int]],
        max_samples: int = 32,
        half_life: float = 64.0,
    ) -> StepCurve:
        """A curve from samples of (rows, seconds) or (rows, seconds, sequences, context tokens), oldest first.

        All samples have one weight, except those from before the machine changed.
        """
        curve = cls(max_samples, half_life)
        for sample in samples:
            curve.observe(*sample)
        for bucket, entries in curve._buckets.items():
            curve._buckets[bucket] = [entry._replace(born=curve._clock) for entry in entries]
        return curve

    def observe(self, rows: int, seconds: float, sequences: int = 1, context_tokens: int = 0) -> None:
        """Add one measured step.

        Raises:
            ValueError: the numbers cannot be those of a step.
        """
        if rows < 1 or not (math.isfinite(seconds) and seconds > 0) or sequences < 0 or context_tokens < 0:
            raise ValueError(
                f"not a step: {rows} rows of {sequences} sequences over {context_tokens} tokens in {seconds!r} s"
            )
        self._clock += 1
        entries = self._buckets.setdefault(bucket_of(rows), [])
        entries.append(StepSample(self._clock, self._clock, seconds, sequences, context_tokens))
        if len(entries) > self._max_samples:
            del entries[0]
        self._fit = None

    def seconds(self, rows: int, sequences: int | None = None, context_tokens: int | None = None) -> float:
        """Expected seconds of a step.

        Beyond the largest measured bucket the curve continues with its last slope or its mean slope, whichever
        is larger. With a single bucket it grows in proportion to the rows.

        Args:
            rows: rows of the step.
            sequences, context_tokens: of the step. Where either is None, as in the steps that were measured
                with that many rows.

        Raises:
            ValueError: nothing has been observed.
        """
        fit = self._fitted()
        if sequences is None or context_tokens is None:
            return fit.typical(rows)
        return fit.seconds(rows, sequences, context_tokens)

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

    def _fitted(self) -> CurveFit:
        if self._fit is None:
            if not self._buckets:
                raise ValueError("the step curve is empty: no step has been observed")
            self._fit = fit_curve(self._buckets, self._clock, self._half_life)
        return self._fit
