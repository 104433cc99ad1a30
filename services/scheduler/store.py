"""A subject's measurements and policy in Redis.

Responsible for: reading them back, merging a delta atomically (compare-and-set in Lua, merged again on
conflict), and drawing policy versions that rise whoever publishes. Values are JSON objects with a schema
version; every key has a TTL. A value that is not of this layout is logged and replaced, never fatal.

Deliberately does not know: when to write, gRPC, how policies are made. Called by services.scheduler.registry.
"""

from __future__ import annotations

import json
import random
from asyncio import sleep
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import resources
from typing import Any

import structlog

from services.runtime.redis_store import RedisStore, StoreUnavailableError
from services.scheduler.measurements import PARTS, SCHEMA_VERSION, Measurements, Part
from services.scheduler.publication import PublishedPolicy
from services.scheduler.subject import Subject

_MAX_ATTEMPTS = 16
_POLICY = "policy"

_log = structlog.get_logger()


@dataclass(slots=True)
class Synced:
    """What this process last saw in Redis for one subject: raw values by part, absent where there was none."""

    raw: dict[str, str] = field(default_factory=dict)


class MeasurementStore:
    """Measurements and policies by subject.

    Args:
        redis: the connection; its outages surface as StoreUnavailableError.
        ttl_s: time to live of every key, counted from its last write.
    """

    def __init__(self, redis: RedisStore, ttl_s: float) -> None:
        self._redis = redis
        self._ttl_ms = str(int(ttl_s * 1000))
        self._swap = (resources.files(__package__) / "swap.lua").read_text(encoding="utf-8")

    @property
    def available(self) -> bool:
        """Whether Redis can be reached."""
        return self._redis.available

    async def load(self, subject: Subject, synced: Synced) -> Measurements:
        """Read all parts; what is absent or unreadable is empty.

        Raises:
            StoreUnavailableError: Redis is gone.
        """
        keys = [subject.redis_key(kind.name) for kind in PARTS]
        values: list[Any] = await self._redis.run(lambda client: client.mget(keys))
        parts: dict[str, Part] = {}
        for kind, raw in zip(PARTS, values, strict=True):
            parts[kind.name] = _decode_part(kind, raw, subject) or kind()
            _remember(synced, kind.name, raw)
        return Measurements(**parts)  # type: ignore[arg-type]

    async def merge(
        self, subject: Subject, synced: Synced, known: Measurements, delta: Measurements
    ) -> Measurements:
        """Merge what was measured since the last merge.

        Where Redis still holds what this process last saw, or nothing (it was emptied), the value becomes
        ``known``, which already contains the delta. Where another scheduler wrote meanwhile, the delta is
        merged into that.

        Returns:
            What Redis holds now.

        Raises:
            StoreUnavailableError: Redis is gone; none or some of the parts were written. Merging the same
                delta again is right, unless Redis applied a write whose answer was lost: then it counts
                twice.
        """
        merged: dict[str, Part] = {}
        for kind, whole, new in zip(PARTS, known.parts(), delta.parts(), strict=True):
            merged[kind.name] = (
                await self._merge_part(subject, synced, kind, whole, new) if new.count else whole
            )
        return Measurements(**merged)  # type: ignore[arg-type]

    async def load_policy(self, subject: Subject, synced: Synced) -> PublishedPolicy | None:
        """The policy that was published last, by whichever scheduler.

        Raises:
            StoreUnavailableError: Redis is gone.
        """
        raw: Any = await self._redis.run(lambda client: client.get(subject.redis_key(_POLICY)))
        _remember(synced, _POLICY, raw)
        return _decode_policy(raw, subject)

    async def publish(self, subject: Subject, synced: Synced, policy: PublishedPolicy) -> PublishedPolicy:
        """Keep a policy, raising its version above the one that Redis holds.

        Raises:
            StoreUnavailableError: Redis is gone, or other writers never paused.
        """
        expected = synced.raw.get(_POLICY, "")
        for _ in range(_MAX_ATTEMPTS):
            stored = _decode_policy(expected, subject)
            if stored is not None and stored.version >= policy.version:
                policy = policy.with_version(stored.version + 1)
            raw = _encode(policy.to_dict())
            current = await self._compare_and_set(subject.redis_key(_POLICY), expected, raw)
            if current is None:
                _remember(synced, _POLICY, raw)
                return policy
            expected = current
            await sleep(random.uniform(0, 0.01))
        raise StoreUnavailableError("too many writers publish for one subject")

    async def _merge_part(
        self, subject: Subject, synced: Synced, kind: type[Part], whole: Part, new: Part
    ) -> Part:
        key = subject.redis_key(kind.name)
        expected = synced.raw.get(kind.name, "")
        for _ in range(_MAX_ATTEMPTS):
            raw = _encode(whole.to_dict())
            current = await self._compare_and_set(key, expected, raw)
            if current is None:
                _remember(synced, kind.name, raw)
                return whole
            stored = _decode_part(kind, current, subject)
            if stored is not None:
                whole = stored.merged(new)  # type: ignore[arg-type]  # both are of this kind
            expected = current
            await sleep(random.uniform(0, 0.01))
        raise StoreUnavailableError("too many writers merge into one subject")

    async def _compare_and_set(self, key: str, expected: str, value: str) -> str | None:
        """Set; None when it was set, else what is there instead (empty for nothing)."""
        answer: list[Any] = await self._redis.run(
            lambda client: client.eval(self._swap, 1, key, expected, value, self._ttl_ms)
        )
        if int(answer[0]) == 1:
            return None
        return str(answer[1]) if len(answer) > 1 else ""


def part_to_dict(part: Part) -> dict[str, Any]:
    """The layout of one part as it is kept in Redis, without the time of writing."""
    return {"schema_version": SCHEMA_VERSION, **part.to_dict()}


def _encode(value: Mapping[str, Any]) -> str:
    written_at = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({"schema_version": SCHEMA_VERSION, "written_at": written_at, **value}, allow_nan=False)


def _remember(synced: Synced, name: str, raw: str | None) -> None:
    if raw:
        synced.raw[name] = raw
    else:
        synced.raw.pop(name, None)


def _decode_part(kind: type[Part], raw: str | None, subject: Subject) -> Part | None:
    value = _decode(kind.name, raw, subject)
    if value is None:
        return None
    try:
        return kind.from_dict(value)
    except (ValueError, KeyError, TypeError) as error:
        _log.warning(
            "stored value is not readable", part=kind.name, model=subject.model_label, cause=str(error)
        )
        return None


def _decode_policy(raw: str | None, subject: Subject) -> PublishedPolicy | None:
    value = _decode(_POLICY, raw, subject)
    if value is None:
        return None
    try:
        return PublishedPolicy.from_dict(value)
    except (ValueError, KeyError, TypeError) as error:
        _log.warning(
            "stored value is not readable", part=_POLICY, model=subject.model_label, cause=str(error)
        )
        return None


def _decode(name: str, raw: str | None, subject: Subject) -> dict[str, Any] | None:
    if not raw:
        return None
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or value.get("schema_version") != SCHEMA_VERSION:
        _log.warning("stored value is of another layout", part=name, model=subject.model_label)
        return None
    return value
