"""What speculation really brought, beside what plain decoding would have.

Responsible for: sums over timed passes that forget old ones, one set for each policy, and how sure they are.

Deliberately does not know: policies' content, real time, transports.

Called by: the scheduler service, which asks whether the model that chose a policy was right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

MIN_PASSES = 16
"""Of fewer not even the error is known; a second of passes that wait for a long round trip has as many."""

MODEL_ERROR = 0.1
"""How far a model's speed-up may be off, as a standard deviation."""

_DECAY = 0.998  # of a pass's weight with each later one: about the last five hundred count
_WAIT_LEARNING = 0.05  # share of a new wait: another network shows in a second
_LEAST_WAIT_S = 1e-4  # looking whether there is a draft takes less, waiting for one more
_LEARNING = 0.05  # share of a new plain pass in what one costs besides its step


@dataclass(frozen=True, slots=True)
class TimedPass:
    """One target pass in which every sequence decoded.

    Attributes:
        policy_version: of the policy it was made under.
        num_rows: rows in it; as many as sequences where no draft was verified.
        num_sequences: sequences in it.
        num_tokens: tokens that it committed, over all of them.
        num_cache_hits: sequences whose next tokens had been proposed already when it ended.
        may_draft: whether drafts may be made for every one of its sequences.
        step_s: the step itself, verification included.
        wait_s: time it was held for drafts, and time that a drafter in its process took before it.
        other_s: what else passed since the pass before it.
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
            raise ValueError(f"a pass that cannot be: {self}")
        if min(self.step_s, self.wait_s, self.other_s) < 0:
            raise ValueError(f"times must not be negative: {self}")

    @property
    def has_waited(self) -> bool:
        """Whether it waited for a draft, or for one to be made."""
        return self.wait_s > _LEAST_WAIT_S

    @property
    def period_s(self) -> float:
        """From the end of the pass before it to its own."""
        return self.step_s + self.wait_s + self.other_s


@dataclass(frozen=True, slots=True)
class MeasuredSpeed:
    """Tokens a second under one policy.

    Attributes:
        speedup: over plain decoding at the same load.
        error: its standard error.
        hit_rate: share of the sequences' passes that ended with the next tokens proposed already.
        num_passes: passes that it rests on; old ones count for less than one.
        wait_s: how long the newest passes that waited for a draft did; None where too few did.
    """

    speedup: float
    error: float
    hit_rate: float
    num_passes: float
    wait_s: float | None = None

    def believed(self, expected: float) -> float:
        """The likeliest speed-up, given what a model expected of it before anything was measured.

        The mean of both, weighted by how sure each is: few passes move a belief a little, many overrule it. So what
        loses a little is found out as well as what loses a lot, only later.

        Args:
            expected: the model's, taken for right within `MODEL_ERROR`.
        """
        weight = MODEL_ERROR**2 / (MODEL_ERROR**2 + self.error**2)
        return weight * self.speedup + (1 - weight) * expected


class SpeedMeter:
    """Sums over the passes of the newest policy; passes of older ones that come late do not count."""

    def __init__(self) -> None:
        self._version = 0
        self._plain_other_s: float | None = None
        self._clear()

    def _clear(self) -> None:
        self._weight = self._hits = self._sequences = 0.0
        self._plain = self._real = 0.0  # seconds
        self._waits, self._wait_s = 0, 0.0  # passes that waited, and how long of late
        self._plain_2 = self._real_2 = self._both = 0.0  # of squares and products, for the error

    def add(self, one: TimedPass, plain_step: Callable[[int], float]) -> None:
        """Take in a pass.

        Args:
            one: the pass.
            plain_step: seconds of a step over that many sequences, without drafts, as measured.
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
        """What a policy brought; None where too few passes were made under it."""
        if policy_version != self._version or self._weight < MIN_PASSES or self._real <= 0:
            return None
        speedup = self._plain / self._real
        # Of a ratio of sums: the squares of what each pass gave beyond its share.
        squares = self._plain_2 - 2 * speedup * self._both + speedup * speedup * self._real_2
        error = math.sqrt(max(squares, 0.0)) / self._real
        wait_s = self._wait_s if self._waits >= MIN_PASSES else None
        return MeasuredSpeed(speedup, error, self._hits / self._sequences, self._weight, wait_s)
