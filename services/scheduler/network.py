"""Round trips, and waits at drafters, by pair of peers: a part of services.scheduler.measurements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, ClassVar, Self

from paceline.contract.limits import MAX_PEER_PAIRS
from paceline.scheduling import DurationSketch
from services.scheduler.layout import integer, text

OTHER = ("other", "other")
"""Name of all pairs beyond MAX_PEER_PAIRS."""

Pair = tuple[str, str]
"""Conductor and drafter; both empty where a report does not name them."""


@dataclass(frozen=True, slots=True)
class PairSketch:
    """Two distributions between two peers, each measured by one clock.

    Attributes:
        round_trip: conductor to drafter and back less the drafter's own time, by the conductor's clock.
        queue: from the arrival of everything that a draft reads to the begin of drafting, by the drafter's
            clock.
    """

    round_trip: DurationSketch = field(default_factory=DurationSketch)
    queue: DurationSketch = field(default_factory=DurationSketch)

    def merged(self, newer: PairSketch) -> PairSketch:
        """These distributions with newer durations added."""
        return PairSketch(self.round_trip.merged(newer.round_trip), self.queue.merged(newer.queue))


@dataclass(frozen=True, slots=True)
class NetworkPart:
    """Distributions by pair, and how many round trips there ever were."""

    name: ClassVar[str] = "network"
    pairs: Mapping[Pair, PairSketch] = field(default_factory=dict)

    @classmethod
    def of(cls, round_trips_us: Iterable[int], queues_us: Iterable[int] = (), pair: Pair = ("", "")) -> Self:
        """From microseconds, of one pair."""
        sketch = PairSketch(
            DurationSketch.of(us / 1e6 for us in round_trips_us),
            DurationSketch.of(us / 1e6 for us in queues_us),
        )
        return cls({pair: sketch} if sketch.round_trip.count or sketch.queue.count else {})

    @property
    def count(self) -> int:
        """Round trips ever."""
        return sum(sketch.round_trip.count for sketch in self.pairs.values())

    def merged(self, newer: Self) -> Self:
        """This part with newer durations added; pairs beyond MAX_PEER_PAIRS are counted as one."""
        pairs = dict(self.pairs)
        for pair, sketch in newer.pairs.items():
            key = pair if pair in pairs or len(pairs) < MAX_PEER_PAIRS else OTHER
            pairs[key] = pairs.get(key, PairSketch()).merged(sketch)
        return type(self)(pairs)

    def to_dict(self) -> dict[str, Any]:
        """JSON layout."""
        return {
            "count": self.count,
            "peers": [
                {
                    "conductor": conductor,
                    "drafter": drafter,
                    "round_trip": sketch.round_trip.to_dict(),
                    "queue": sketch.queue.to_dict(),
                }
                for (conductor, drafter), sketch in sorted(self.pairs.items())
            ],
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Read the layout back, checking every number."""
        pairs: dict[Pair, PairSketch] = {}
        for peer in value["peers"][: MAX_PEER_PAIRS + 1]:
            pair = text(peer["conductor"]), text(peer["drafter"])
            pairs[pair] = PairSketch(
                DurationSketch.from_dict(peer["round_trip"]), DurationSketch.from_dict(peer["queue"])
            )
        integer(value["count"], 0, 2**53)
        return cls(pairs)

    def estimator(self) -> DurationSketch:
        """Round trip over all pairs."""
        return reduce(DurationSketch.joined, (s.round_trip for s in self.pairs.values()), DurationSketch())

    def queue(self) -> DurationSketch:
        """Wait at the drafter over all pairs."""
        return reduce(DurationSketch.joined, (s.queue for s in self.pairs.values()), DurationSketch())
