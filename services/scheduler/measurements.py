"""All measurements of a subject, as parts that can be merged.

Responsible for: the parts together, and merging newer measurements into older ones. Each part knows its JSON
layout (the one stored in Redis) and the paceline.scheduling estimator that it yields.

Merging is associative: ``a.merged(b).merged(c) == a.merged(b.merged(c))`` up to rounding. So a delta can be
collected while Redis is away, and several schedulers can merge theirs into one value, without counting anything
twice.

Deliberately does not know: Redis, gRPC, policies. Called by services.scheduler.{reports,store,planning}.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.scheduler.acceptance import AcceptancePart
from services.scheduler.draft_acceptance import DraftAcceptancePart
from services.scheduler.draft_times import DraftTimePart
from services.scheduler.layout import SCHEMA_VERSION, SchemaError
from services.scheduler.network import NetworkPart
from services.scheduler.step_times import MAX_SAMPLES_PER_BUCKET, CurvePart
from services.scheduler.tenants import TenantsPart

__all__ = [
    "MAX_SAMPLES_PER_BUCKET",
    "PARTS",
    "SCHEMA_VERSION",
    "AcceptancePart",
    "CurvePart",
    "DraftAcceptancePart",
    "DraftTimePart",
    "Measurements",
    "NetworkPart",
    "Part",
    "SchemaError",
    "TenantsPart",
]

Part = CurvePart | AcceptancePart | DraftTimePart | NetworkPart | DraftAcceptancePart | TenantsPart
PARTS: tuple[type[Part], ...] = (
    CurvePart,
    AcceptancePart,
    DraftTimePart,
    NetworkPart,
    DraftAcceptancePart,
    TenantsPart,
)


@dataclass(frozen=True, slots=True)
class Measurements:
    """All parts of one subject."""

    curve: CurvePart = field(default_factory=CurvePart)
    acceptance: AcceptancePart = field(default_factory=AcceptancePart)
    draft_time: DraftTimePart = field(default_factory=DraftTimePart)
    network: NetworkPart = field(default_factory=NetworkPart)
    outcomes: DraftAcceptancePart = field(default_factory=DraftAcceptancePart)
    tenants: TenantsPart = field(default_factory=TenantsPart)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was measured."""
        return not any(part.count for part in self.parts())

    def parts(self) -> tuple[Part, ...]:
        """The parts in the order of PARTS."""
        return (self.curve, self.acceptance, self.draft_time, self.network, self.outcomes, self.tenants)

    def merged(self, newer: Measurements) -> Measurements:
        """These measurements with newer ones added."""
        return Measurements(
            self.curve.merged(newer.curve),
            self.acceptance.merged(newer.acceptance),
            self.draft_time.merged(newer.draft_time),
            self.network.merged(newer.network),
            self.outcomes.merged(newer.outcomes),
            self.tenants.merged(newer.tenants),
        )

    def reconciled(self, stored: Measurements, delta: Measurements) -> tuple[Measurements, Measurements]:
        """Compare these measurements (delta included) with those just read from Redis.

        A part that Redis has lost is restored whole. Any other part is the stored one with the delta added.

        Returns:
            What Redis should have, and which part of it is new to Redis.
        """
        whole: dict[str, Part] = {}
        outgoing: dict[str, Part] = {}
        for ours, theirs, new in zip(self.parts(), stored.parts(), delta.parts(), strict=True):
            is_lost = not theirs.count
            whole[ours.name] = ours if is_lost else theirs.merged(new)  # type: ignore[arg-type]  # of one kind
            outgoing[ours.name] = ours if is_lost else new
        return Measurements(**whole), Measurements(**outgoing)  # type: ignore[arg-type]
