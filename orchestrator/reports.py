"""Measurements on their way to the scheduler.

Responsible for: collecting what steps and drafts cost and how much was accepted, and sending it in batches over one
Report stream. It never blocks and never grows: what a slow or absent scheduler does not take is dropped and counted.
Deliberately does not know what the scheduler makes of it. Filled by orchestrator.cycles and
orchestrator.draft_dispatcher, run by orchestrator.conductor.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

import grpc
import structlog

from orchestrator.draft_acceptance import AcceptanceCounter
from orchestrator.sequences import passes_per_position
from paceline.v1 import drafter_pb2, generation_pb2, scheduler_pb2, scheduler_pb2_grpc, target_pb2
from services.runtime.channel import Tls, open_channel
from services.runtime.tenants import MAX_TENANTS, OTHER

MAX_SAMPLES = 2048
MAX_PEERS = 64
MAX_US = 600_000_000  # more is no measurement, and would cost the whole frame
INTERVAL_S = 0.25
WRITE_TIMEOUT_S = 2.0
BACKOFF_S = (0.2, 5.0)

log = structlog.get_logger()


class Reports:
    """Samples since the last frame.

    Args:
        key: what is measured; None while that is not known.
        longest_draft: most tokens in a row of the drafter's drafts; 0 where positions alone bound them.
        conductor: whose measurements they are.

    Attributes:
        num_dropped: samples that were pushed out before they could be sent.
        outcomes: what became of drafted tokens.
    """

    def __init__(
        self,
        key: Callable[[], scheduler_pb2.MeasurementKey | None],
        longest_draft: Callable[[], int] = lambda: 0,
        conductor: str = "conductor",
    ) -> None:
        self.num_dropped = 0
        self.outcomes = AcceptanceCounter()
        self._key = key
        self._longest_draft = longest_draft
        self._conductor = conductor
        self._steps: deque[scheduler_pb2.StepSample] = deque(maxlen=MAX_SAMPLES)
        self._drafts: deque[scheduler_pb2.DraftSample] = deque(maxlen=MAX_SAMPLES)
        self._round_trips_us: deque[tuple[str, int]] = deque(maxlen=MAX_SAMPLES)
        self._queues_us: deque[tuple[str, int]] = deque(maxlen=MAX_SAMPLES)
        self._depths: Counter[int] = Counter()
        self._accepted: Counter[int] = Counter()
        self._tenants: dict[str, scheduler_pb2.TenantUse] = {}
        self._num_running = 0

    def step(
        self,
        step: target_pb2.StepReport,
        depths: Iterable[tuple[int, int]],
        num_running: int,
        draft_length: int,
        *,
        num_tokens: int = 0,
        may_draft: bool = False,
    ) -> None:
        """Notes one step.

        Args:
            step: the verifier's report.
            depths: of its sequences, (depth of what a drafter proposed, accepted tokens of that).
            num_running: running sequences now.
            draft_length: tokens a draft in force.
            num_tokens: tokens it committed.
            may_draft: whether drafts may be made for every one of its sequences.
        """
        self._num_running = num_running
        for depth, accepted in depths:
            self._depths[depth] += 1
            self._accepted[accepted] += 1
        is_decoding = not step.num_prefill_rows and len(step.commits.sequence_ids) == step.num_sequences
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
                    wait_us=min(step.draft_wait_us + step.colocated_draft_us, MAX_US),
                    # Verification and commit are part of the step here and of the overhead there.
                    other_us=max(0, step.overhead_us + step.forward_us - step.step_us),
                ),
            )
        if step.colocated_draft_us and draft_length:
            self._push(
                self._drafts,
                scheduler_pb2.DraftSample(
                    num_draft_steps=draft_length,
                    num_sequences=max(len(step.commits.sequence_ids), 1),
                    draft_us=step.colocated_draft_us,
                ),
            )

    def profile(self, profile: target_pb2.StepProfile) -> None:
        """Notes the steps that a verifier timed at its start; arrays that do not agree are no profile."""
        arrays = (
            profile.num_rows,
            profile.num_sequences,
            profile.num_context_tokens,
            profile.step_us,
        )
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
        """Notes what one answer of a drafter says about its speed and the way to it.

        Args:
            frame: the answer.
            round_trip_us: there and back less the drafter's own time, at this clock; None where it was not asked for.
            drafter: its endpoint.
        """
        if frame.num_draft_steps:
            self._push(self._queues_us, (drafter, min(frame.wait_us, MAX_US)))
        if frame.num_draft_steps and frame.num_sequences:
            self._push(
                self._drafts,
                scheduler_pb2.DraftSample(
                    num_draft_steps=frame.num_draft_steps,
                    num_sequences=frame.num_sequences,
                    draft_us=frame.draft_us,
                ),
            )
        if round_trip_us is not None:
            self._push(self._round_trips_us, (drafter, min(round_trip_us, MAX_US)))

    def ended(self, tenant: str, stats: generation_pb2.GenerationStats) -> None:
        """Notes a request of a tenant that ended."""
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
        samples = (
            self._steps,
            self._drafts,
            self._round_trips_us,
            self._depths,
            self.outcomes,
            self._tenants,
        )
        if not any(samples):
            return None
        peers = list(dict.fromkeys(peer for peer, _ in (*self._round_trips_us, *self._queues_us)))[:MAX_PEERS]
        places = {peer: place for place, peer in enumerate(peers)}
        round_trips = [(places[peer], us) for peer, us in self._round_trips_us if peer in places]
        queues = [(places[peer], us) for peer, us in self._queues_us if peer in places]
        frame = scheduler_pb2.ReportRequest(
            key=self._key(),
            steps=self._steps,
            drafts=self._drafts,
            peers=[scheduler_pb2.PeerPair(conductor=self._conductor, drafter=peer) for peer in peers],
            round_trips_us=[us for _, us in round_trips],
            round_trip_peers=[place for place, _ in round_trips],
            queues_us=[us for _, us in queues],
            queue_peers=[place for place, _ in queues],
            outcomes=self.outcomes.take(),
            tenants=self._tenants.values(),
            drafted_per_position=passes_per_position(self._depths),
            accepted_per_position=passes_per_position(self._accepted),
            num_running_sequences=self._num_running,
            longest_draft=self._longest_draft(),
        )
        for queue in (self._steps, self._drafts, self._round_trips_us, self._queues_us):
            queue.clear()
        self._depths.clear()
        self._accepted.clear()
        self._tenants.clear()
        return frame

    async def run(self, endpoint: str, tls: Tls | None) -> None:
        """Sends to the scheduler until cancelled; connects again whenever the stream ends."""
        backoff_s, reason = BACKOFF_S[0], ""
        while True:
            channel = open_channel(endpoint, tls)
            try:
                call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Report()
                while True:
                    await asyncio.sleep(INTERVAL_S)
                    frame = self.take() if self._key() is not None else None
                    if frame is not None:
                        async with asyncio.timeout(WRITE_TIMEOUT_S):
                            await call.write(frame)
                        backoff_s = BACKOFF_S[0]
            except (
                grpc.aio.AioRpcError,
                TimeoutError,
                asyncio.InvalidStateError,
                grpc.aio.UsageError,
            ) as error:
                if type(error).__name__ != reason:
                    reason = type(error).__name__
                    log.warning("report stream down", endpoint=endpoint, error=str(error) or reason)
            finally:
                await channel.close(None)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, BACKOFF_S[1])

    def _push(self, samples: deque[Any], sample: object) -> None:
        self.num_dropped += len(samples) == MAX_SAMPLES
        samples.append(sample)
