"""A subject's measurements and policy in Redis.

Responsible for: reading them, merging a delta atomically, drawing policy versions that rise whichever scheduler
publishes, and the history of policies. A merge is a compare-and-set of all parts together in Lua; on conflict
the delta is merged again. Values are JSON objects with a schema version, and every key has a TTL. A value of
another layout is logged and moved to a key of its own; it is never fatal.

Deliberately does not know: when to write, gRPC, how policies are made. Called by services.scheduler.registry.
"""

from __future__ import annotations

import random
from asyncio import sleep
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.contract.policy import SpeculationPolicy
from services.runtime.redis_store import RedisStore, StoreUnavailableError
from services.scheduler.measurements import PARTS, Measurements, Part
from services.scheduler.script import Script
from services.scheduler.stored_values import POLICY, decode, encode, is_part, read_part, read_policy
from services.scheduler.subject import Subject

_MAX_ATTEMPTS = 64
_HISTORY = "policy_history"
MAX_HISTORY = 64
"""Policies kept in the history, newest first."""


@dataclass(slots=True)
class Synced:
    """What this process last saw in Redis for one subject: raw values by part; a part without a value is absent."""

    raw: dict[str, str] = field(default_factory=dict)

    def remember(self, name: str, raw: str | None) -> None:
        """Note a value that was just read or written; None or empty for an absent one."""
        if raw:
            self.raw[name] = raw
        else:
            self.raw.pop(name, None)


class MeasurementStore:
    """Measurements and policies by subject.

    Args:
        redis: the connection; while Redis is unreachable, every operation raises StoreUnavailableError.
        ttl_s: time to live of every key, counted from its last write.
    """

    def __init__(self, redis: RedisStore, ttl_s: float) -> None:
        self._redis = redis
        self._ttl_ms = str(int(ttl_s * 1000))
        self._swap = Script("swap.lua")
        self._append = Script("append.lua")

    @property
    def available(self) -> bool:
        """Whether Redis can be reached."""
        return self._redis.available

    async def load(self, subject: Subject, synced: Synced) -> Measurements:
        """Read all parts; a part that is absent or unreadable is empty.

        Raises:
            StoreUnavailableError: Redis cannot be reached.
        """
        keys = [subject.redis_key(kind.name) for kind in PARTS]
        values: list[Any] = await self._redis.run(lambda client: client.mget(keys))
        parts: dict[str, Part] = {}
        for kind, raw in zip(PARTS, values, strict=True):
            parts[kind.name] = read_part(kind, raw, subject) or kind()
            synced.remember(kind.name, raw)
        return Measurements(**parts)  # type: ignore[arg-type]

    async def merge(
        self, subject: Subject, synced: Synced, known: Measurements, delta: Measurements
    ) -> Measurements:
        """Merge what was measured since the last merge.

        If Redis still has what this process last saw, or nothing (it was emptied), the value becomes ``known``,
        which already contains the delta. If another scheduler wrote in between, the delta is merged into what
        that scheduler wrote.

        Args:
            subject: what the measurements are about.
            synced: what this process last saw; updated.
            known: all measurements, the delta included.
            delta: measured since the last merge.

        Returns:
            What Redis has now.

        Raises:
            StoreUnavailableError: Redis cannot be reached, and nothing was written. Merging the same delta
                again is right, unless Redis applied a write whose answer was lost: then the delta counts twice.
        """
        merged: dict[str, Part] = dict(zip((kind.name for kind in PARTS), known.parts(), strict=True))
        fresh = {kind: new for kind, new in zip(PARTS, delta.parts(), strict=True) if new.count}
        if not fresh:
            return known
        for _ in range(_MAX_ATTEMPTS):
            raws = {kind.name: encode(merged[kind.name].to_dict()) for kind in fresh}
            expected = {kind.name: synced.raw.get(kind.name, "") for kind in fresh}
            aside = {
                kind.name for kind in fresh if expected[kind.name] and not is_part(kind, expected[kind.name])
            }
            current = await self._compare_and_set(subject, expected, raws, aside)
            if current is None:
                for name, raw in raws.items():
                    synced.remember(name, raw)
                return Measurements(**merged)  # type: ignore[arg-type]  # each is of its kind
            for kind, new in fresh.items():
                raw = current[kind.name]
                if raw != expected[kind.name]:
                    stored = read_part(kind, raw, subject)
                    if stored is not None:
                        merged[kind.name] = stored.merged(new)  # type: ignore[arg-type]  # both are of this kind
                    synced.remember(kind.name, raw)
            await sleep(random.uniform(0, 0.01))
        raise StoreUnavailableError(f"gave up merging after {_MAX_ATTEMPTS} conflicts with other writers")

    async def load_policy(self, subject: Subject, synced: Synced) -> SpeculationPolicy | None:
        """The policy that was published last, by any scheduler.

        Raises:
            StoreUnavailableError: Redis cannot be reached.
        """
        raw: Any = await self._redis.run(lambda client: client.get(subject.redis_key(POLICY)))
        synced.remember(POLICY, raw)
        return read_policy(raw, subject)

    async def publish(self, subject: Subject, synced: Synced, policy: SpeculationPolicy) -> SpeculationPolicy:
        """Store a policy, with a version above the stored one.

        Raises:
            StoreUnavailableError: Redis cannot be reached, or other writers interfered 64 times.
        """
        expected = synced.raw.get(POLICY, "")
        for _ in range(_MAX_ATTEMPTS):
            stored = read_policy(expected, subject)
            if stored is not None and stored.version >= policy.version:
                policy = replace(policy, version=stored.version + 1)
            raw = encode(policy.to_dict())
            aside = {POLICY} if expected and stored is None else set()
            current = await self._compare_and_set(subject, {POLICY: expected}, {POLICY: raw}, aside)
            if current is None:
                synced.remember(POLICY, raw)
                await self._note(subject, raw)
                return policy
            expected = current[POLICY]
            await sleep(random.uniform(0, 0.01))
        raise StoreUnavailableError(f"gave up publishing after {_MAX_ATTEMPTS} conflicts with other writers")

    async def _note(self, subject: Subject, raw: str) -> None:
        """Prepend a published policy to the history."""
        arguments = [self._ttl_ms, raw, str(MAX_HISTORY)]
        keys = [subject.redis_key(_HISTORY)]
        await self._redis.run(lambda client: self._append.run(client, keys, arguments))

    async def load_history(self, subject: Subject) -> list[dict[str, Any]]:
        """Published policies, newest first; each is `SpeculationPolicy.to_dict` and ``written_at``.

        Raises:
            StoreUnavailableError: Redis cannot be reached.
        """
        key = subject.redis_key(_HISTORY)
        raws: list[Any] = await self._redis.run(lambda client: client.lrange(key, 0, MAX_HISTORY - 1))
        values = [decode(_HISTORY, raw, subject) for raw in raws]
        return [value for value in values if value is not None]

    async def _compare_and_set(
        self, subject: Subject, expected: Mapping[str, str], values: Mapping[str, str], aside: Set[str]
    ) -> dict[str, str] | None:
        """Set all values if each key still has its expected value.

        Returns:
            None when all were set; otherwise the present values by name, empty for an absent one.
        """
        keys = [subject.redis_key(name) for name in values]
        arguments = [self._ttl_ms]
        for name, value in values.items():
            arguments += [expected[name], value, "1" if name in aside else "0"]
        answer: list[Any] = await self._redis.run(lambda client: self._swap.run(client, keys, arguments))
        if int(answer[0]) == 1:
            return None
        return dict(zip(values, (str(value) for value in answer[1:]), strict=True))
