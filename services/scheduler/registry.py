"""Subjects in memory: their measurements, policies and watchers.

Responsible for: opening a subject (warm from Redis where it can be), taking deltas, the loop that plans,
publishes and syncs with Redis, waking watchers, and carrying on in memory while Redis is gone.

Deliberately does not know: gRPC. Called by services.scheduler.servicer; one event loop, no locks across
awaits but the one that keeps syncs of a subject apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import structlog

from paceline.contract.errors import CapacityError
from paceline.scheduling.speed import TimedPass
from services.runtime import metrics
from services.runtime.redis_store import StoreUnavailableError
from services.scheduler.measurements import Measurements
from services.scheduler.planning import Planner, PlanningLimits
from services.scheduler.publication import PublishedPolicy, next_version
from services.scheduler.store import MAX_HISTORY, MeasurementStore, Synced, part_to_dict
from services.scheduler.subject import Subject

_log = structlog.get_logger()

MAX_PASSES = 4096
_ROUNDS_HALF_LIFE = 64.0


class SubjectState:
    """All that this process knows about one subject.

    Attributes:
        measurements: everything, including what Redis does not have yet.
        policy: the policy in force.
        load: running sequences by report stream, that is by target.
        round_fraction: sequences that drafters drafted for together of late, over those that a target ran then: less
            than 1 where a target's sequences are spread over drafters, more where targets share one.
        longest_draft: most tokens in a row of the drafter's drafts; None where positions alone bound them.
        has_changed: something was measured since the last decision.
        history: policies that were published, newest first, as kept in Redis.
    """

    def __init__(self, subject: Subject, planner: Planner) -> None:
        self.subject = subject
        self.planner = planner
        self.measurements = Measurements()
        self.passes: deque[TimedPass] = deque(maxlen=MAX_PASSES)  # since the last decision
        self.pending = Measurements()  # measured here and not yet merged into Redis
        self.synced = Synced()
        self.policy: PublishedPolicy | None = None
        self.history: deque[dict[str, Any]] = deque(maxlen=MAX_HISTORY)
        self.is_policy_stored = False
        self.has_changed = True
        self.is_recovering = False  # Redis was away and may have been emptied
        self.load: dict[object, int] = {}
        self.round_fraction = 1.0
        self.longest_draft: int | None = None
        self.num_users = 0
        self.synced_at = float("-inf")
        self.changed = asyncio.Condition()
        self.lock = asyncio.Lock()

    @property
    def num_running_sequences(self) -> int:
        """Over all report streams."""
        return sum(self.load.values())

    @property
    def sequences_per_target(self) -> int:
        """That a target runs which runs any, in the mean: steps are each target's own."""
        busy = [load for load in self.load.values() if load]
        return math.ceil(sum(busy) / len(busy)) if busy else 0

    def take(self, delta: Measurements, passes: Sequence[TimedPass] = (), num_sequences: int = 0) -> None:
        """Add fresh measurements, and the passes that say what the policy in force brings.

        Args:
            delta: since the last report of the same stream.
            passes: of the same time.
            num_sequences: that the stream's target runs.
        """
        together = delta.draft_time.mean_sequences
        if together is not None and num_sequences:
            fresh = 1 - 2 ** (-delta.draft_time.count / _ROUNDS_HALF_LIFE)
            self.round_fraction += fresh * (together / num_sequences - self.round_fraction)
        self.measurements = self.measurements.merged(delta)
        self.pending = self.pending.merged(delta)
        self.has_changed = True
        self.passes.extend(passes)

    def to_dict(self) -> dict[str, Any]:
        """For people and tests: the layout kept in Redis, by part."""
        return {
            "key": asdict(self.subject),
            "num_running_sequences": self.num_running_sequences,
            **{part.name: part_to_dict(part) for part in self.measurements.parts()},
            "measured_speed": None if (speed := self.planner.measured_speed) is None else asdict(speed),
            "policy_history": list(self.history),
        }


class Registry:
    """Subjects by key.

    Args:
        store: Redis, or None to live in memory only.
        limits: what plans are bound by.
        max_subjects: subjects kept; idle ones leave for new ones.
        flush_interval_s: pause between merges into Redis.
        refresh_interval_s: pause between reads of what other schedulers merged.
        clock: monotonic seconds.
        wall_clock: unix seconds.
    """

    def __init__(
        self,
        store: MeasurementStore | None,
        limits: PlanningLimits,
        *,
        max_subjects: int = 256,
        flush_interval_s: float = 1.0,
        refresh_interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._limits = limits
        self._max_subjects = max_subjects
        self._flush_interval_s = flush_interval_s
        self._refresh_interval_s = refresh_interval_s
        self._clock = clock
        self._wall_clock = wall_clock
        self._states: dict[Subject, SubjectState] = {}

    @property
    def is_redis_connected(self) -> bool:
        """Whether measurements and policies reach Redis now."""
        return self._store is not None and self._store.available

    @property
    def subjects(self) -> tuple[Subject, ...]:
        """Subjects in memory, oldest first."""
        return tuple(self._states)

    async def open(self, subject: Subject) -> SubjectState:
        """The state of a subject; read from Redis the first time, so that a fresh process starts warm.

        Raises:
            CapacityError: max_subjects are all in use.
        """
        state = self._states.get(subject)
        if state is None:
            self._make_room()
            state = SubjectState(subject, Planner(subject, self._limits, self._clock))
            self._states[subject] = state
        if state.policy is None:
            async with state.lock:
                if state.policy is None:
                    await self._warm_up(state)
        return state

    @contextlib.contextmanager
    def using(self, state: SubjectState, token: object = None) -> Iterator[None]:
        """While a stream is about this subject, it stays; its load, kept under ``token``, goes when it ends."""
        state.num_users += 1
        try:
            yield
        finally:
            state.num_users -= 1
            state.load.pop(token, None)

    async def run(self, plan_interval_s: float) -> None:
        """Plan and sync until cancelled; a subject's trouble is logged and does not end the loop."""
        while True:
            for state in list(self._states.values()):
                try:
                    await self.tick(state)
                except Exception as error:
                    _log.error("planning failed", model=state.subject.model_label, exc_info=error)
            await asyncio.sleep(plan_interval_s)

    async def tick(self, state: SubjectState) -> None:
        """Sync one subject if it is time, then decide anew."""
        async with state.lock:
            await self._sync(state)
            if state.has_changed or state.num_running_sequences:  # a target that rests needs no decisions
                state.has_changed = False
                await self._plan(state)

    async def flush(self) -> None:
        """Merge everything that is pending, as at shutdown."""
        for state in list(self._states.values()):
            async with state.lock:
                await self._sync(state, is_forced=True)

    async def on_redis_change(self, is_available: bool) -> None:
        """Redis came or went. One that comes back may be empty, or another: everything is reconciled with it."""
        if not is_available:
            return
        for state in list(self._states.values()):
            state.is_recovering = True
            state.is_policy_stored = False
            state.synced_at = float("-inf")

    async def wake(self) -> None:
        """Wake all watchers, so that they see that the process drains."""
        for state in list(self._states.values()):
            async with state.changed:
                state.changed.notify_all()

    async def _warm_up(self, state: SubjectState) -> None:
        if self._store is not None and self._store.available:
            with contextlib.suppress(StoreUnavailableError):
                stored = await self._store.load(state.subject, state.synced)
                state.measurements = stored.merged(state.pending)
                state.policy = await self._store.load_policy(state.subject, state.synced)
                state.is_policy_stored = state.policy is not None
                state.history.extend(await self._store.load_history(state.subject))
                state.synced_at = self._clock()
                if not stored.is_empty:
                    _log.info("warm start", model=state.subject.model_label, method=state.subject.method)
        await self._plan(state)

    async def _sync(self, state: SubjectState, *, is_forced: bool = False) -> None:
        store, now = self._store, self._clock()
        if store is None or not store.available:
            return
        delta = state.pending
        pause_s = self._refresh_interval_s if delta.is_empty else self._flush_interval_s
        if not is_forced and now - state.synced_at < pause_s:
            return
        state.pending = Measurements()
        try:
            known, outgoing = state.measurements, delta
            if delta.is_empty or state.is_recovering:
                stored = await store.load(state.subject, state.synced)
                known, outgoing = known.reconciled(stored, delta)
            stored = await store.merge(state.subject, state.synced, known, outgoing)
            state.is_recovering = False
            if not state.is_policy_stored and state.policy is not None:
                await self._store_policy(state, store)
        except StoreUnavailableError as error:
            state.pending = delta.merged(state.pending)
            _log.warning("sync failed", model=state.subject.model_label, cause=str(error))
            return
        state.has_changed = state.has_changed or stored != state.measurements
        state.measurements = stored.merged(state.pending)  # what came in while this was under way
        state.synced_at = now

    async def _plan(self, state: SubjectState) -> None:
        version = 0 if state.policy is None else state.policy.version
        decision = state.planner.decide(
            state.measurements,
            state.sequences_per_target,
            state.passes,
            version,
            longest_draft=state.longest_draft,
            round_fraction=state.round_fraction,
        )
        state.passes.clear()
        if (speed := state.planner.measured_speed) is not None:
            metrics.POLICY_MEASURED_SPEEDUP.labels(
                state.subject.model_label, state.subject.method or "none", state.subject.placement
            ).set(speed.speedup)
        candidate = PublishedPolicy.of(
            decision.policy,
            version=0,
            max_nodes_per_step=decision.max_nodes_per_step,
            expected_speedup=decision.expected_speedup,
        )
        if state.policy is not None and not candidate.differs_from(state.policy):
            return
        newest = state.policy.version if state.policy is not None else 0
        state.policy = candidate.with_version(next_version(int(self._wall_clock() * 1000), newest))
        state.is_policy_stored = False
        written_at = datetime.fromtimestamp(self._wall_clock(), UTC).isoformat(timespec="milliseconds")
        state.history.appendleft({"written_at": written_at, **state.policy.to_dict()})
        if self._store is not None and self._store.available:
            try:
                await self._store_policy(state, self._store)
            except StoreUnavailableError as error:  # published all the same; stored with the next sync
                _log.warning("policy not stored", model=state.subject.model_label, cause=str(error))
        await self._announce(state)

    async def _store_policy(self, state: SubjectState, store: MeasurementStore) -> None:
        assert state.policy is not None
        stored = await store.publish(state.subject, state.synced, state.policy)
        has_moved = stored.version != state.policy.version
        state.policy, state.is_policy_stored = stored, True
        if has_moved:
            await self._announce(state)

    async def _announce(self, state: SubjectState) -> None:
        policy, subject = state.policy, state.subject
        assert policy is not None
        labels = (subject.model_label, subject.method or "none", subject.placement)
        metrics.POLICY_VERSION.labels(*labels).set(policy.version)
        metrics.POLICY_DRAFT_LENGTH.labels(*labels).set(policy.draft_length)
        metrics.POLICY_SPEEDUP.labels(*labels).set(policy.expected_speedup)
        _log.info(
            "policy",
            model=subject.model_label,
            method=subject.method,
            placement=subject.placement,
            version=policy.version,
            draft_length=policy.draft_length,
            wait_budget_us=policy.wait_budget_us,
            reason=policy.reason,
        )
        async with state.changed:
            state.changed.notify_all()

    def _make_room(self) -> None:
        if len(self._states) < self._max_subjects:
            return
        for subject, state in self._states.items():  # oldest first
            is_saved = state.pending.is_empty or self._store is None
            if not state.num_users and is_saved and not state.lock.locked():
                del self._states[subject]
                return
        raise CapacityError(f"{self._max_subjects} subjects are in use")
