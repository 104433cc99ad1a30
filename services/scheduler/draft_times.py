"""Draft times of a subject, the newest by draft steps and sequences: a part of services.scheduler.measurements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from paceline.contract.limits import MAX_MEASURED_US
from paceline.scheduling import DraftTimeModel
from paceline.scheduling.curves import bucket_of
from services.scheduler.layout import integer

_MAX_SAMPLES_PER_BUCKET = 16
_MAX_BUCKETS = 128

Bucket = tuple[int, int]
"""Draft steps in a row, and the bucket of the number of sequences drafted for."""


@dataclass(frozen=True, slots=True)
class DraftTimePart:
    """Draft times: per (draft steps, sequences), the number of rounds and the newest times, oldest first."""

    name: ClassVar[str] = "draft_time"
    buckets: Mapping[Bucket, tuple[int, tuple[int, ...]]] = field(default_factory=dict)

    @classmethod
    def of(cls, samples: Iterable[tuple[int, int] | tuple[int, int, int]]) -> Self:
        """From (draft steps, microseconds) or (draft steps, microseconds, sequences), oldest first."""
        buckets: dict[Bucket, list[int]] = {}
        for steps, draft_us, *rest in samples:
            sequences = rest[0] if rest else 1
            buckets.setdefault((steps, bucket_of(sequences)), []).append(draft_us)
        return cls(
            {key: (len(all_), tuple(all_[-_MAX_SAMPLES_PER_BUCKET:])) for key, all_ in buckets.items()}
        )

    @property
    def count(self) -> int:
        """Rounds ever."""
        return sum(count for count, _ in self.buckets.values())

    def merged(self, newer: Self) -> Self:
        """This part with newer rounds added."""
        buckets = dict(self.buckets)
        for key, (count, samples) in newer.buckets.items():
            old_count, old = buckets.get(key, (0, ()))
            if key in buckets or len(buckets) < _MAX_BUCKETS:
                buckets[key] = (old_count + count, (*old, *samples)[-_MAX_SAMPLES_PER_BUCKET:])
        return type(self)(buckets)

    def to_dict(self) -> dict[str, Any]:
        """JSON layout."""
        return {
            "count": self.count,
            "buckets": [
                {"draft_steps": steps, "sequences": sequences, "count": count, "samples_us": list(samples)}
                for (steps, sequences), (count, samples) in sorted(self.buckets.items())
            ],
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Read the layout back, checking every number."""
        buckets: dict[Bucket, tuple[int, tuple[int, ...]]] = {}
        for bucket in value["buckets"][:_MAX_BUCKETS]:
            newest = bucket["samples_us"][-_MAX_SAMPLES_PER_BUCKET:]
            samples = tuple(integer(us, 1, MAX_MEASURED_US) for us in newest)
            key = integer(bucket["draft_steps"], 1, 4096), integer(bucket["sequences"], 1, 2**31)
            if samples:
                buckets[key] = (integer(bucket["count"], 1, 2**53), samples)
        return cls(buckets)

    @property
    def mean_sequences(self) -> float | None:
        """Mean number of sequences that a round drafted for, over all rounds ever; None without any."""
        counts = [(sequences, count) for (_, sequences), (count, _) in self.buckets.items()]
        total = sum(count for _, count in counts)
        return sum(sequences * count for sequences, count in counts) / total if total else None

    def estimator(self, *, grows_with_length: bool = True) -> DraftTimeModel:
        """Draft time over draft steps and sequences.

        Args:
            grows_with_length: whether drafting takes longer for longer drafts; otherwise every draft counts as
                one step.
        """
        return DraftTimeModel.fit(
            (steps if grows_with_length else 1, us / 1e6, sequences)
            for (steps, sequences), (_, samples) in sorted(self.buckets.items())
            for us in samples
        )
