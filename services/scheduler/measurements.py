"""What is known about a subject, as four mergeable parts.

Responsible for: the parts, how newer measurements are merged into older ones, their JSON layout (the one kept
in Redis), and the paceline.scheduling estimators that they amount to.

Merging is associative: ``a.merged(b).merged(c) == a.merged(b.merged(c))`` up to rounding. So a delta can be
collected while Redis is away, and several schedulers can merge theirs into one value, without either counting
twice.

Deliberately does not know: Redis, gRPC, policies. Called by services.scheduler.{reports,store,planning}.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from paceline.scheduling import AcceptanceEstimator, DraftTimeModel, DurationEstimator, StepCurve
from paceline.scheduling.curves import bucket_of

SCHEMA_VERSION = 1
MAX_SAMPLES_PER_BUCKET = 32
MAX_BUCKETS = 128
MAX_ROUND_TRIPS = 128
MAX_POSITIONS = 64
_ACCEPTANCE_HALF_LIFE = 1024.0  # passes: a few seconds of traffic, an error of about 1%
_DRAFT_HALF_LIFE = 256.0
_MAX_US = 600_000_000


class SchemaError(ValueError):
    """A stored value that is not of this layout."""


@dataclass(frozen=True, slots=True)
class CurvePart:
    """Step times: per bucket of rows, the newest samples in microseconds (oldest first) and how many there were."""

    name: ClassVar[str] = "curve"
    buckets: Mapping[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)

    @classmethod
    def of(cls, samples: Iterable[tuple[int, int]]) -> Self:
        """From (rows, microseconds), oldest first."""
        buckets: dict[int, list[int]] = {}
        for rows, step_us in samples:
            buckets.setdefault(bucket_of(rows), []).append(step_us)
        return cls(
            {rows: (len(all_us), tuple(all_us[-MAX_SAMPLES_PER_BUCKET:])) for rows, all_us in buckets.items()}
        )

    @property
    def count(self) -> int:
        """Samples ever."""
        return sum(count for count, _ in self.buckets.values())

    def merged(self, newer: Self) -> Self:
        """With newer samples after these."""
        buckets = dict(self.buckets)
        for rows, (count, samples) in newer.buckets.items():
            old_count, old = buckets.get(rows, (0, ()))
            if rows in buckets or len(buckets) < MAX_BUCKETS:
                buckets[rows] = (old_count + count, (*old, *samples)[-MAX_SAMPLES_PER_BUCKET:])
        return type(self)(buckets)

    def to_dict(self) -> dict[str, Any]:
        """JSON layout."""
        return {
            "buckets": [
                {"rows": rows, "count": count, "samples_us": list(samples)}
                for rows, (count, samples) in sorted(self.buckets.items())
            ]
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Read the layout back, checking every number."""
        buckets: dict[int, tuple[int, tuple[int, ...]]] = {}
        for bucket in value["buckets"][:MAX_BUCKETS]:
            samples = tuple(_integer(us, 1, _MAX_US) for us in bucket["samples_us"][-MAX_SAMPLES_PER_BUCKET:])
            if samples:
                buckets[_integer(bucket["rows"], 1, 2**31)] = (_integer(bucket["count"], 1, 2**53), samples)
        return cls(buckets)

    def estimator(self) -> StepCurve:
        """Step time over rows."""
        return StepCurve.fit(
            (rows, step_us / 1e6)
            for rows, (_, samples) in sorted(self.buckets.items())
            for step_us in samples
        )


@dataclass(frozen=True, slots=True)
class AcceptancePart:
    """Decayed trials and acceptances per position, and how many passes there ever were."""

    name: ClassVar[str] = "acceptance"
    count: int = 0
    attempts: tuple[float, ...] = ()
    accepts: tuple[float, ...] = ()

    @classmethod
    def of(cls, drafted: tuple[int, ...], accepted: tuple[int, ...]) -> Self:
        """From counts of passes per position (neither rises with the position, accepted <= drafted).

        A trial of position i is a pass that verified it with all before it accepted. The counts do not say
        which of the accepted passes were longer than i, so the share of passes that long is taken for them,
        too; when all drafts have one length this is exact.
        """
        if not drafted or drafted[0] == 0:
            return cls()
        attempts, accepts = [float(drafted[0])], [float(accepted[0])]
        for i in range(1, len(drafted)):
            if not drafted[i] or not accepted[i - 1]:
                break
            guess = accepted[i - 1] * drafted[i] / drafted[i - 1]
            attempts.append(max(float(accepted[i]), min(guess, accepted[i - 1], drafted[i])))
            accepts.append(float(accepted[i]))
        num_passes = drafted[0]
        scale = _batch_scale(num_passes, _ACCEPTANCE_HALF_LIFE)
        return cls(num_passes, tuple(a * scale for a in attempts), tuple(a * scale for a in accepts))

    def merged(self, newer: Self) -> Self:
        """With newer passes after these: what is here fades by their number."""
        fade = 2.0 ** (-newer.count / _ACCEPTANCE_HALF_LIFE)
        return type(self)(
            self.count + newer.count,
            _faded_sum(self.attempts, newer.attempts, fade),
            _faded_sum(self.accepts, newer.accepts, fade),
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON layout."""
        return {"count": self.count, "attempts": list(self.attempts), "accepts": list(self.accepts)}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Read the layout back, checking every number."""
        attempts = tuple(_number(n, 1e9) for n in value["attempts"][:MAX_POSITIONS])
        accepts = tuple(_number(n, 1e9) for n in value["accepts"][:MAX_POSITIONS])
        if len(attempts) != len(accepts):
            raise SchemaError("attempts and accepts differ in length")
        return cls(_integer(value["count"], 0, 2**53), attempts, accepts)

    def estimator(self) -> AcceptanceEstimator:
        """Conditional acceptance per position."""
        if not self.attempts:
            return AcceptanceEstimator(half_life=_ACCEPTANCE_HALF_LIFE)
        accepts = [min(hits, trials) for hits, trials in zip(self.accepts, self.attempts, strict=True)]
        value = {"schema_version": 1, "attempts": list(self.attempts), "accepts": accepts}
        return AcceptanceEstimator.from_dict(value, half_life=_ACCEPTANCE_HALF_LIFE)


@dataclass(frozen=True, slots=True)
class DraftTimePart:
    """Decayed sums of 1, k, k*k, t and k*t over drafter rounds of k draft steps that took t seconds."""

    name: ClassVar[str] = "draft_time"
    count: int = 0
    sums: tuple[float, ...] = (0.0,) * 5

    @classmethod
    def of(cls, samples: Iterable[tuple[int, int]]) -> Self:
        """From (draft steps, microseconds), oldest first."""
        part = cls()
        for steps, draft_us in samples:
            seconds = draft_us / 1e6
            sums = (1.0, float(steps), float(steps * steps), seconds, steps * seconds)
            part = part.merged(cls(1, sums))
        return part

    def merged(self, newer: Self) -> Self:
        """With newer rounds after these."""
        fade = 2.0 ** (-newer.count / _DRAFT_HALF_LIFE)
        return type(self)(self.count + newer.count, _faded_sum(self.sums, newer.sums, fade))

    def to_dict(self) -> dict[str, Any]:
        """JSON layout."""
        return {"count": self.count, "sums": list(self.sums)}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Read the layout back, checking every number."""
        sums = tuple(_number(n, 1e15) for n in value["sums"])
        if len(sums) != 5:
            raise SchemaError("draft time has five sums")
        return cls(_integer(value["count"], 0, 2**53), sums)

    @property
    def mean_s(self) -> float:
        """Decayed mean of a round."""
        return self.sums[3] / self.sums[0] if self.sums[0] else 0.0

    def estimator(self) -> DraftTimeModel:
        """Draft time over draft steps."""
        return DraftTimeModel.from_dict(
            {"schema_version": 1, "sums": list(self.sums)}, half_life=_DRAFT_HALF_LIFE
        )


@dataclass(frozen=True, slots=True)
class NetworkPart:
    """The newest round trips less the drafter's own time, microseconds, oldest first."""

    name: ClassVar[str] = "network"
    count: int = 0
    round_trips_us: tuple[int, ...] = ()

    @classmethod
    def of(cls, round_trips_us: Iterable[int]) -> Self:
        """From microseconds, oldest first."""
        samples = tuple(round_trips_us)
        return cls(len(samples), samples[-MAX_ROUND_TRIPS:])

    def merged(self, newer: Self) -> Self:
        """With newer round trips after these."""
        joint = (*self.round_trips_us, *newer.round_trips_us)[-MAX_ROUND_TRIPS:]
        return type(self)(self.count + newer.count, joint)

    def to_dict(self) -> dict[str, Any]:
        """JSON layout."""
        return {"count": self.count, "round_trips_us": list(self.round_trips_us)}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Read the layout back, checking every number."""
        samples = tuple(_integer(us, 0, _MAX_US) for us in value["round_trips_us"][-MAX_ROUND_TRIPS:])
        return cls(_integer(value["count"], len(samples), 2**53), samples)

    def estimator(self) -> DurationEstimator:
        """Round trip time."""
        estimator = DurationEstimator(window=MAX_ROUND_TRIPS)
        for round_trip_us in self.round_trips_us:
            estimator.observe(round_trip_us / 1e6)
        return estimator


Part = CurvePart | AcceptancePart | DraftTimePart | NetworkPart
PARTS: tuple[type[Part], ...] = (CurvePart, AcceptancePart, DraftTimePart, NetworkPart)


@dataclass(frozen=True, slots=True)
class Measurements:
    """All four parts of one subject."""

    curve: CurvePart = field(default_factory=CurvePart)
    acceptance: AcceptancePart = field(default_factory=AcceptancePart)
    draft_time: DraftTimePart = field(default_factory=DraftTimePart)
    network: NetworkPart = field(default_factory=NetworkPart)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was measured."""
        return not any(part.count for part in self.parts())

    def parts(self) -> tuple[Part, ...]:
        """The parts in the order of PARTS."""
        return (self.curve, self.acceptance, self.draft_time, self.network)

    def merged(self, newer: Measurements) -> Measurements:
        """With newer measurements after these."""
        return Measurements(
            self.curve.merged(newer.curve),
            self.acceptance.merged(newer.acceptance),
            self.draft_time.merged(newer.draft_time),
            self.network.merged(newer.network),
        )

    def reconciled(self, stored: Measurements, delta: Measurements) -> tuple[Measurements, Measurements]:
        """Compare what is known here (delta included) with what was just read.

        A part that the store has lost is given back whole; any other part gets the delta on top of what is
        stored.

        Returns:
            What the store should hold, and what is new to it.
        """
        whole: dict[str, Part] = {}
        outgoing: dict[str, Part] = {}
        for ours, theirs, new in zip(self.parts(), stored.parts(), delta.parts(), strict=True):
            is_lost = not theirs.count
            whole[ours.name] = ours if is_lost else theirs.merged(new)  # type: ignore[arg-type]  # of one kind
            outgoing[ours.name] = ours if is_lost else new
        return Measurements(**whole), Measurements(**outgoing)  # type: ignore[arg-type]


def _batch_scale(count: int, half_life: float) -> float:
    """What the mean of ``count`` consecutive samples weighs, over what ``count`` undecayed ones would."""
    decay: float = 2.0 ** (-1.0 / half_life)
    weight: float = (1.0 - decay**count) / (count * (1.0 - decay))
    return weight


def _faded_sum(old: tuple[float, ...], newer: tuple[float, ...], fade: float) -> tuple[float, ...]:
    length = max(len(old), len(newer))
    padded_old = (*old, *(0.0,) * (length - len(old)))
    padded_new = (*newer, *(0.0,) * (length - len(newer)))
    return tuple(a * fade + b for a, b in zip(padded_old, padded_new, strict=True))


def _integer(value: object, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise SchemaError(f"expected an integer from {low} to {high}, got {value!r}")
    return value


def _number(value: object, high: float) -> float:
    if (
        not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= high
    ):  # NaN fails, too
        raise SchemaError(f"expected a number from 0 to {high}, got {value!r}")
    return float(value)
