"""Counters of one conductor, and their Prometheus form.

Responsible for: what a conductor counts, and the names of the counts in Prometheus. A conductor is a Ray actor without
a metrics port: the orchestrator process receives the counts with its status and exports them (`StatusCollector`).
Deliberately does not know Ray.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from orchestrator.status import ConductorStatus
from paceline.v1 import sampling_pb2


@dataclass(slots=True)
class Counters:
    """What happened since the conductor started."""

    num_requests: int = 0
    num_cancelled: int = 0
    num_resumes: int = 0
    num_steps: int = 0
    num_committed_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_draft_entries: int = 0
    num_stale_commits: int = 0
    num_stale_drafts: int = 0
    num_malformed_drafts: int = 0
    num_drafter_openings: int = 0
    num_drafter_failures: int = 0
    num_round_trips: int = 0
    sum_round_trips_us: int = 0
    finished: Counter[int] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, int]:
        """All counts by name; finished requests by reason."""
        flat = {name: getattr(self, name) for name in self.__slots__ if name != "finished"}
        for reason, count in self.finished.items():
            name = sampling_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()
            flat[f"finished_{name}"] = count
        return flat


_HELP = {
    "num_requests": ("requests", "Requests started."),
    "num_cancelled": ("cancelled_requests", "Requests whose reader went away."),
    "num_resumes": ("resumes", "Times a request was opened again at a verifier."),
    "num_steps": ("steps", "Step reports received."),
    "num_committed_tokens": ("committed_tokens", "Tokens committed."),
    "num_draft_tokens": ("draft_tokens", "Draft tokens verified."),
    "num_accepted_tokens": ("accepted_tokens", "Draft tokens accepted."),
    "num_draft_entries": ("draft_entries", "Draft entries forwarded to the verifier."),
    "num_stale_commits": ("stale_commits", "Commits dropped: unknown sequence or old epoch."),
    "num_stale_drafts": ("stale_drafts", "Draft entries dropped: unknown sequence or old epoch."),
    "num_malformed_drafts": ("malformed_drafts", "Draft entries dropped: malformed."),
    "num_drafter_openings": ("drafter_openings", "Sequences opened at drafters."),
    "num_drafter_failures": ("drafter_failures", "Sequences that failed at drafters."),
    "num_round_trips": ("round_trips", "Frames to drafters that were answered."),
    "sum_round_trips_us": ("round_trip_microseconds", "Their round trips, less the drafters' own time."),
}


class StatusCollector(Collector):
    """Exports the last status of every conductor."""

    def __init__(self, statuses: Callable[[], Iterable[ConductorStatus]]) -> None:
        self._statuses = statuses

    def collect(self) -> Iterator[Metric]:
        """The metrics, labelled with the verifier's endpoint."""
        statuses = list(self._statuses())
        for name, (metric, text) in _HELP.items():
            family = CounterMetricFamily(f"paceline:conductor_{metric}", text, labels=["verifier"])
            for status in statuses:
                family.add_metric([status.verifier_endpoint], status.counters.get(name, 0))
            yield family
        finished = CounterMetricFamily(
            "paceline:conductor_finished_requests",
            "Requests ended, by reason.",
            labels=["verifier", "reason"],
        )
        running = GaugeMetricFamily(
            "paceline:conductor_running_sequences", "Running sequences.", labels=["verifier"]
        )
        ready = GaugeMetricFamily(
            "paceline:conductor_ready", "1 while the verifier is reached.", labels=["verifier"]
        )
        drafters = GaugeMetricFamily(
            "paceline:conductor_drafters_up", "Drafters reached.", labels=["verifier"]
        )
        for status in statuses:
            label = [status.verifier_endpoint]
            running.add_metric(label, status.num_running)
            ready.add_metric(label, int(status.is_ready))
            drafters.add_metric(label, len(status.drafters))
            for name, count in status.counters.items():
                if name.startswith("finished_"):
                    finished.add_metric([status.verifier_endpoint, name.removeprefix("finished_")], count)
        yield from (finished, running, ready, drafters)
