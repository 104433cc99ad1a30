"""Subjects in memory: their measurements, policies and watchers.

Responsible for: opening a subject (from Redis where possible), the loop that plans, publishes and merges into
Redis, waking watchers, and working in memory alone while Redis is unreachable.

Deliberately does not know: gRPC. Called by services.scheduler.servicer, on one event loop. The only lock held
across an await keeps the merges of one subject apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime

import structlog

from paceline.contract.errors import CapacityError
from services.runtime import metrics
from services.runtime.redis_store import StoreUnavailableError
from services.scheduler.measurements import Measurements
from services.scheduler.planning import Planner, PlanningLimits
from services.scheduler.publication import is_change, next_version
from services.scheduler.store import MeasurementStore
from services.scheduler.subject import Subject
from services.scheduler.subject_state import SubjectState

_log = structlog.get_logger()


class Registry:
    """Subjects by key.

    Args:
        store: Redis, or None to keep everything in memory.
        limits: bounds of every plan.
        max_subjects: subjects kept; unused ones leave for new ones.
        flush_interval_s: pause between merges into Redis.
        refresh_interval_s: pause between reads of what other schedulers merged.
    """

    def __init__(
        self,
        store: MeasurementStore | None,
        limits: PlanningLimits,
        *,
        max_subjects: int = 256,
        flush_interval_s: float = 1.0,
        refresh_interval_s: float = 10.0,
    ) -> None:
        self._store = store
        self._limits = limits
        self._max_subjects = max_subjects
        self._flush_interval_s = flush_interval_s
        self._refresh_interval_s = refresh_interval_s
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
        """The state of a subject. The first call reads it from Redis, so that a restarted process starts warm.

        Raises:
            CapacityError: max_subjects are all in use.
        """
        state = self._states.get(subject)
        if state is None:
            self._evict_unused()
            state = SubjectState(subject, Planner(subject, self._limits, time.monotonic))
            self._states[subject] = state
        if state.policy is None:
            async with state.lock:
                if state.policy is None:
                    await self._warm_up(state)
        return state

    @contextlib.contextmanager
    def using(self, state: SubjectState, token: object = None) -> Iterator[None]:
        """Keep a subject while a stream is about it. The stream's load, stored under ``token``, is removed when
        the stream ends.
        """
        state.num_users += 1
        try:
            yield
        finally:
            state.num_users -= 1
            state.load.pop(token, None)

    async def run(self, plan_interval_s: float) -> None:
        """Plan and merge until cancelled. An error with one subject is logged and does not end the loop."""
        while True:
            for state in list(self._states.values()):
                try:
                    await self.tick(state)
                except Exception as error:
                    _log.error("planning failed", model=state.subject.model_label, exc_info=error)
            await asyncio.sleep(plan_interval_s)

    async def tick(self, state: SubjectState) -> None:
        """Merge one subject into Redis if it is time, then decide again."""
        async with state.lock:
            await self._sync(state)
            if state.has_changed or state.num_running_sequences:  # an idle target needs no decisions
                state.has_changed = False
                await self._plan(state)

    async def flush(self) -> None:
        """Merge everything that is pending, as at shutdown."""
        for state in list(self._states.values()):
            async with state.lock:
                await self._sync(state, is_forced=True)

    async def on_redis_change(self, is_available: bool) -> None:
        """Called when Redis becomes reachable or unreachable. A Redis that returns may be empty, or another one:
        every subject is reconciled with it.
        """
        if not is_available:
            return
        for state in list(self._states.values()):
            state.is_recovering = True
            state.is_policy_stored = False
            state.synced_at = float("-inf")

    async def wake(self) -> None:
        """Wake all watchers, so that they notice that the process drains."""
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
                state.synced_at = time.monotonic()
                if not stored.is_empty:
                    _log.info("warm start", model=state.subject.model_label, method=state.subject.method)
        await self._plan(state)

    async def _sync(self, state: SubjectState, *, is_forced: bool = False) -> None:
        store, now = self._store, time.monotonic()
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
        state.measurements = stored.merged(state.pending)  # pending: measured during this merge
        state.synced_at = now

    async def _plan(self, state: SubjectState) -> None:
        version = 0 if state.policy is None else state.policy.version
        candidate = state.planner.decide(
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
        if state.policy is not None and not is_change(candidate, state.policy):
            return
        newest = state.policy.version if state.policy is not None else 0
        version = next_version(int(time.time() * 1000), newest)
        state.policy = replace(candidate, version=version)
        state.is_policy_stored = False
        written_at = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds")
        state.history.appendleft({"written_at": written_at, **state.policy.to_dict()})
        if self._store is not None and self._store.available:
            try:
                await self._store_policy(state, self._store)
            except StoreUnavailableError as error:  # watchers get it anyway; the next merge stores it
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

    def _evict_unused(self) -> None:
        """Forget the oldest unused subject if there are `max_subjects` already."""
        if len(self._states) < self._max_subjects:
            return
        for subject, state in self._states.items():  # oldest first
            is_saved = state.pending.is_empty or self._store is None
            if not state.num_users and is_saved and not state.lock.locked():
                del self._states[subject]
                return
        raise CapacityError(f"all {self._max_subjects} subjects are in use; raise max_subjects")
