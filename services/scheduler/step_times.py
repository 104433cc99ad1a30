"""Step times of a subject, the newest by rows: a part of services.scheduler.measurements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

from paceline.contract.limits import MAX_CONTEXT_TOKENS, MAX_MEASURED_US
from paceline.scheduling import StepCurve
from paceline.scheduling.curves import bucket_of
from services.scheduler.layout import integer

MAX_SAMPLES_PER_BUCKET = 32
MAX_BUCKETS = 128


class StepTime(NamedTuple):
    """One step. ``at_ms`` is when the scheduler received it, unix milliseconds; it gives the order across buckets."""

    step_us: int
    sequences: int
    context_tokens: int
    at_ms: int


@dataclass(frozen=True, slots=True)
class CurvePart:
    """Step times: per bucket of rows, the number of steps and the newest times, oldest first."""

    name: ClassVar[str] = "curve"
    buckets: Mapping[int, tuple[int, tuple[StepTime, ...]]] = field(default_factory=dict)

    @classmethod
    def of(cls, samples: Iterable[tuple[int, int] | tuple[int, int, int, int]], at_ms: int = 0) -> Self:
        """From (rows, microseconds) or (rows, microseconds, sequences, context tokens), oldest first.

        Args:
            samples: the steps.
            at_ms: when the first was received. Each further one counts as a millisecond later, which keeps
                their order.
        """
        buckets: dict[int, list[StepTime]] = {}
        for index, (rows, step_us, *rest) in enumerate(samples):
            sequences, context_tokens = rest or (1, 0)
            step = StepTime(step_us, sequences, context_tokens, at_ms + index)
            buckets.setdefault(bucket_of(rows), []).append(step)
        return cls(
            {rows: (len(all_), tuple(all_[-MAX_SAMPLES_PER_BUCKET:])) for rows, all_ in buckets.items()}
        )

    @property
    def count(self) -> int:
        """Samples ever."""
        return sum(count for count, _ in self.buckets.values())

    def merged(self, newer: Self) -> Self:
        """This part with newer samples added."""
        buckets = dict(self.buckets)
        for rows, (count, samples) in newer.buckets.items():
            old_count, old = buckets.get(rows, (0, ()))
            if rows in buckets or len(buckets) < MAX_BUCKETS:
                buckets[rows] = (old_count + count, (*old, *samples)[-MAX_SAMPLES_PER_BUCKET:])
        return type(self)(buckets)

    def to_dict(self) -> dict[str, Any]:
        """JSON layout. Samples are [microseconds, sequences, context tokens, unix milliseconds]."""
        return {
            "buckets": [
                {"rows": rows, "count": count, "samples": [list(sample) for sample in samples]}
                for rows, (count, samples) in sorted(self.buckets.items())
            ]
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Read the layout back, checking every number."""
        buckets: dict[int, tuple[int, tuple[StepTime, ...]]] = {}
        for bucket in value["buckets"][:MAX_BUCKETS]:
            samples = tuple(
                StepTime(
                    integer(step_us, 1, MAX_MEASURED_US),
                    integer(sequences, 0, 2**31),
                    integer(context_tokens, 0, MAX_CONTEXT_TOKENS),
                    integer(at_ms, 0, 2**53),
                )
                for step_us, sequences, context_tokens, at_ms in bucket["samples"][-MAX_SAMPLES_PER_BUCKET:]
            )
            if samples:
                buckets[integer(bucket["rows"], 1, 2**31)] = (integer(bucket["count"], 1, 2**53), samples)
        return cls(buckets)

    def estimator(self) -> StepCurve:
        """Step time over rows, sequences and context."""
        samples = sorted(
            ((sample, rows) for rows, (_, samples) in sorted(self.buckets.items()) for sample in samples),
            key=lambda pair: pair[0].at_ms,
        )
        return StepCurve.fit(
            ((rows, s.step_us / 1e6, s.sequences, s.context_tokens) for s, rows in samples),
            MAX_SAMPLES_PER_BUCKET,
        )
