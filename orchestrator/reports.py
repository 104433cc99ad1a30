"""Measurements for the scheduler: samples in, one frame out.

Responsible for: collecting what steps and drafts cost and how many draft tokens were accepted. It never blocks and
never grows: samples beyond the bounds push out older ones, which are counted. Deliberately does not know what the
scheduler makes of the measurements. Filled by orchestrator.step_handler, orchestrator.draft_dispatcher and
orchestrator.sequence_lifecycle; sent by orchestrator.report_stream.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from orchestrator.draft_acceptance import AcceptanceCounter
from orchestrator.sequence_stats import passes_per_position
from paceline.contract.limits import MAX_MEASURED_US, MAX_PEER_PAIRS, MAX_TENANTS
from paceline.v1 import drafter_pb2, generation_pb2, scheduler_pb2, target_pb2
from services.runtime.tenants import OTHER

MAX_SAMPLES = 2048


@dataclass(frozen=True, slots=True)
class PeerTime:
    """A time between this conductor and one drafter, microseconds."""

    drafter: str
    us: int


class Reports:
    """Samples since the last frame.

    Args:
        key: what the measurements belong to; None while that is not known.
        longest_draft: most tokens in a row of the drafter's drafts; 0 where only positions bound them.
        conductor: the conductor that measures.

    Attributes:
        num_dropped: samples that were pushed out before they could be sent.
        acceptance: counts of the acceptance samples.
    """

    def __init__(
        self,
        key: Callable[[], scheduler_pb2.MeasurementKey | None],
        longest_draft: Callable[[], int] = lambda: 0,
        conductor: str = "conductor",
    ) -> None:
        self.num_dropped = 0
        self.acceptance = AcceptanceCounter()
        self._key = key
        self._longest_draft = longest_draft
        self._conductor = conductor
        self._steps: deque[scheduler_pb2.StepSample] = deque(maxlen=MAX_SAMPLES)
        self._drafts: deque[scheduler_pb2.DraftSample] = deque(maxlen=MAX_SAMPLES)
        self._round_trips: deque[PeerTime] = deque(maxlen=MAX_SAMPLES)
        self._queues: deque[PeerTime] = deque(maxlen=MAX_SAMPLES)
        self._depths: Counter[int] = Counter()
        self._accepted: Counter[int] = Counter()
        self._tenants: dict[str, scheduler_pb2.TenantUse] = {}
        self._num_running = 0

    @property
    def has_key(self) -> bool:
        """Whether it is known what the measurements belong to."""
        return self._key() is not None

    def step(
        self,
        step: target_pb2.StepReport,
        drafts: Iterable[tuple[int, int]],
        num_running: int,
        draft_length: int,
        *,
        num_tokens: int = 0,
        may_draft: bool = False,
    ) -> None:
        """Adds one step.

        Args:
            step: the verifier's report.
            drafts: of the drafts that count, (depth of the tree, accepted tokens).
            num_running: unfinished sequences now.
            draft_length: tokens per draft in force.
            num_tokens: tokens that the step committed.
            may_draft: whether every one of its sequences may have drafts.
        """
        self._num_running = num_running
        for depth, accepted in drafts:
            self._depths[depth] += 1
            self._accepted[accepted] += 1
        num_commits = len(step.commits.sequence_ids)
        is_decoding = not step.num_prefill_rows and num_commits == step.num_sequences
        if step.num_rows:
            self._push(
                self._steps,
                scheduler_pb2.StepSample(
                    num_rows=step.num_rows,
                    num_sequences=step.num_sequences,
                    num_context_tokens=step.num_context_tokens,
                    step_us=step.step_us,
                    policy_version=step.policy_version,
                    num_tokens=num_tokens if is_decoding else 0,
                    num_cache_hits=sum(step.cache_hits),
                    may_draft=may_draft,
                    wait_us=min(step.draft_wait_us + step.colocated_draft_us, MAX_MEASURED_US),
                    # The verifier counts verification and commit as overhead, the scheduler as part of the step.
                    other_us=max(0, step.overhead_us + step.forward_us - step.step_us),
                ),
            )
        if step.colocated_draft_us and draft_length:
            self._push_draft(draft_length, max(num_commits, 1), step.colocated_draft_us)

    def profile(self, profile: target_pb2.StepProfile) -> None:
        """Adds the steps that a verifier timed at its start; a profile whose arrays disagree is dropped."""
        arrays = (profile.num_rows, profile.num_sequences, profile.num_context_tokens, profile.step_us)
        if len({len(array) for array in arrays}) > 1:
            self.num_dropped += max(len(array) for array in arrays)
            return
        for num_rows, num_sequences, num_context_tokens, step_us in zip(*arrays, strict=True):
            self._push(
                self._steps,
                scheduler_pb2.StepSample(
                    num_rows=num_rows,
                    num_sequences=num_sequences,
                    num_context_tokens=num_context_tokens,
                    step_us=step_us,
                ),
            )

    def draft(self, frame: drafter_pb2.DraftResponse, round_trip_us: int | None, drafter: str = "") -> None:
        """Adds what one answer of a drafter shows of its speed and of the network.

        Args:
            frame: the answer.
            round_trip_us: there and back without the drafter's own time, at this clock; None where it was not measured.
            drafter: the drafter's endpoint.
        """
        if frame.num_draft_steps:
            self._push(self._queues, PeerTime(drafter, min(frame.wait_us, MAX_MEASURED_US)))
        if frame.num_draft_steps and frame.num_sequences:
            self._push_draft(frame.num_draft_steps, frame.num_sequences, frame.draft_us)
        if round_trip_us is not None:
            self._push(self._round_trips, PeerTime(drafter, min(round_trip_us, MAX_MEASURED_US)))

    def ended(self, tenant: str, stats: generation_pb2.GenerationStats) -> None:
        """Adds a request of a tenant that ended."""
        if tenant not in self._tenants and len(self._tenants) >= MAX_TENANTS:
            tenant = OTHER
        use = self._tenants.setdefault(tenant, scheduler_pb2.TenantUse(tenant=tenant))
        use.num_requests += 1
        use.num_tokens += stats.num_generated_tokens
        use.num_draft_tokens += stats.num_draft_tokens
        use.num_accepted_tokens += stats.num_accepted_tokens
        use.decode_us += stats.decode_us

    def take(self) -> scheduler_pb2.ReportRequest | None:
        """All samples since the last call as one frame; None where there are none."""
        samples = (self._steps, self._drafts, self._round_trips, self._depths, self.acceptance, self._tenants)
        if not any(samples):
            return None
        times = (*self._round_trips, *self._queues)
        drafters = list(dict.fromkeys(time.drafter for time in times))[:MAX_PEER_PAIRS]
        indices = {drafter: index for index, drafter in enumerate(drafters)}
        round_trips = [time for time in self._round_trips if time.drafter in indices]
        queues = [time for time in self._queues if time.drafter in indices]
        frame = scheduler_pb2.ReportRequest(
            key=self._key(),
            steps=self._steps,
            drafts=self._drafts,
            peers=[
                scheduler_pb2.PeerPair(conductor=self._conductor, drafter=drafter) for drafter in drafters
            ],
            round_trips_us=[time.us for time in round_trips],
            round_trip_peers=[indices[time.drafter] for time in round_trips],
            queues_us=[time.us for time in queues],
            queue_peers=[indices[time.drafter] for time in queues],
            acceptance=self.acceptance.take(),
            tenants=self._tenants.values(),
            drafted_per_position=passes_per_position(self._depths),
            accepted_per_position=passes_per_position(self._accepted),
            num_running_sequences=self._num_running,
            longest_draft=self._longest_draft(),
        )
        self._clear()
        return frame

    def _clear(self) -> None:
        for queue in (self._steps, self._drafts, self._round_trips, self._queues):
            queue.clear()
        self._depths.clear()
        self._accepted.clear()
        self._tenants.clear()

    def _push_draft(self, num_draft_steps: int, num_sequences: int, draft_us: int) -> None:
        self._push(
            self._drafts,
            scheduler_pb2.DraftSample(
                num_draft_steps=num_draft_steps, num_sequences=num_sequences, draft_us=draft_us
            ),
        )

    def _push(self, samples: deque[Any], sample: object) -> None:
        self.num_dropped += len(samples) == MAX_SAMPLES
        samples.append(sample)
