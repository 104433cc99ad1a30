"""Measured speed-up of speculation over plain decoding.

Responsible for: decayed sums over timed passes, one set for each policy, and the standard error of their ratio.

Deliberately does not know: the content of policies, real time, transports.

Called by: the scheduler service, which checks the model that chose a policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

MIN_PASSES = 16
"""Fewer passes do not even give an error. In a second there are as many passes that wait for a long round trip."""

MODEL_ERROR = 0.1
"""Standard deviation of a model's speed-up from the true one."""

_DECAY = 0.998  # of a pass's weight with each later pass: about the last five hundred count
_WAIT_LEARNING = 0.05  # weight of a new wait in the mean: a changed network shows in a second
_LEAST_WAIT_S = 1e-4  # checking for a draft takes less, waiting for one takes more
_LEARNING = 0.05  # weight of a new plain pass in the mean cost of a pass besides its step


@dataclass(frozen=True, slots=True)
class TimedPass:
    """A target pass in which every sequence decoded.

    Attributes:
        policy_version: of the policy in force when the pass was made.
        num_rows: rows in it; equal to the number of sequences where no draft was verified.
        num_sequences: sequences in it.
        num_tokens: tokens that it committed, over all sequences.
        num_cache_hits: sequences whose next tokens had already been proposed when the pass ended.
        may_draft: whether drafts may be made for every one of its sequences.
        step_s: the step itself, verification included.
        wait_s: time that the pass waited for drafts, and time that a co-located drafter took before it.
        other_s: all other time since the pass before it.
    """

    policy_version: int
    num_rows: int
    num_sequences: int
    num_tokens: int
    num_cache_hits: int
    may_draft: bool
    step_s: float
    wait_s: float
    other_s: float

    def __post_init__(self) -> None:
        if not 1 <= self.num_sequences <= self.num_rows or min(self.num_tokens, self.num_cache_hits) < 0:
            raise ValueError(f"a pass of these counts cannot be: {self}")
        if min(self.step_s, self.wait_s, self.other_s) < 0:
            raise ValueError(f"times must not be negative: {self}")

    @property
    def has_waited(self) -> bool:
        """Whether the pass waited for a draft to arrive or to be made."""
        return self.wait_s > _LEAST_WAIT_S

    @property
    def period_s(self) -> float:
        """From the end of the previous pass to the end of this one."""
        return self.step_s + self.wait_s + self.other_s


@dataclass(frozen=True, slots=True)
class MeasuredSpeed:
    """Speed under one policy.

    Attributes:
        speedup: over plain decoding at the same load.
        error: its standard error.
        hit_rate: fraction of the sequences' passes that ended with the next tokens already proposed.
        num_passes: passes behind these numbers; old passes count for less than one.
        wait_s: mean wait of the newest passes that waited for a draft; None where too few did.
    """

    speedup: float
    error: float
    hit_rate: float
    num_passes: float
    wait_s: float | None = None

    def believed(self, expected: float) -> float:
        """The likeliest speed-up, given what a model expected before anything was measured.

        The mean of both, weighted by their certainty: few passes move the belief a little, many overrule the
        model. A small loss is found out as well as a large one, only later.

        Args:
            expected: the model's speed-up, assumed right within `MODEL_ERROR`.
        """
        weight = MODEL_ERROR**2 / (MODEL_ERROR**2 + self.error**2)
        return weight * self.speedup + (1 - weight) * expected


class SpeedMeter:
    """Decayed sums over the passes of the newest policy. Passes of older policies that arrive late do not count."""

    def __init__(self) -> None:
        self._version = 0
        self._plain_other_s: float | None = None
        self._clear()

    def _clear(self) -> None:
        self._weight = self._hits = self._sequences = 0.0
        self._plain = self._real = 0.0  # seconds
        self._waits, self._wait_s = 0, 0.0  # passes that waited, and their mean wait
        self._plain_2 = self._real_2 = self._both = 0.0  # sums of squares and products, for the error

    def add(self, one: TimedPass, plain_step: Callable[[int], float]) -> None:
        """Add a pass.

        Args:
            one: the pass.
            plain_step: measured seconds of a step over that many sequences without drafts.
        """
        if one.num_rows == one.num_sequences and not one.num_cache_hits:
            known = self._plain_other_s
            self._plain_other_s = one.other_s if known is None else known + _LEARNING * (one.other_s - known)
        if not one.may_draft or one.policy_version < self._version:
            return
        if one.policy_version > self._version:
            self._version = one.policy_version
            self._clear()
        other_s = one.other_s if self._plain_other_s is None else min(self._plain_other_s, one.other_s)
        plain = (plain_step(one.num_sequences) + other_s) * one.num_tokens / one.num_sequences
        real = one.period_s
        for name, value in (
            ("_weight", 1.0),
            ("_hits", one.num_cache_hits),
            ("_sequences", one.num_sequences),
            ("_plain", plain),
            ("_real", real),
            ("_plain_2", plain * plain),
            ("_real_2", real * real),
            ("_both", plain * real),
        ):
            setattr(self, name, _DECAY * getattr(self, name) + value)
        if one.has_waited:
            known = self._wait_s
            self._wait_s = one.wait_s if not self._waits else known + _WAIT_LEARNING * (one.wait_s - known)
            self._waits += 1

    def measured(self, policy_version: int) -> MeasuredSpeed | None:
        """The speed under a policy; None where too few passes were made under it."""
        if policy_version != self._version or self._weight < MIN_PASSES or self._real <= 0:
            return None
        speedup = self._plain / self._real
        # The error of a ratio of sums: squared residuals of each pass from the common ratio.
        squares = self._plain_2 - 2 * speedup * self._both + speedup * speedup * self._real_2
        error = math.sqrt(max(squares, 0.0)) / self._real
        wait_s = self._wait_s if self._waits >= MIN_PASSES else None
        return MeasuredSpeed(speedup, error, self._hits / self._sequences, self._weight, wait_s)
