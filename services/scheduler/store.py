"""A subject's measurements and policy in Redis.

Responsible for: reading them back, merging a delta atomically (compare-and-set of all parts together in Lua, merged
again on conflict), drawing policy versions that rise whoever publishes, and the history of policies. Values are JSON
objects with a schema version; every key has a TTL. A value that is not of this layout is logged and set aside under
a key of its own, never fatal.

Deliberately does not know: when to write, gRPC, how policies are made. Called by services.scheduler.registry.
"""

from __future__ import annotations

import hashlib
import json
import random
from asyncio import sleep
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import resources
from typing import Any

import structlog
from redis.exceptions import NoScriptError

from services.runtime.redis_store import RedisStore, StoreUnavailableError
from services.scheduler.measurements import PARTS, SCHEMA_VERSION, Measurements, Part
from services.scheduler.publication import PublishedPolicy
from services.scheduler.subject import Subject

_MAX_ATTEMPTS = 64
_POLICY = "policy"
_HISTORY = "policy_history"
MAX_HISTORY = 64
"""Policies kept, newest first."""

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
        self._swap = Script("swap.lua")
        self._append = Script("append.lua")

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
            StoreUnavailableError: Redis is gone, and nothing was written. Merging the same delta again is right, unless
                Redis applied a write whose answer was lost: then it counts twice.
        """
        merged: dict[str, Part] = dict(zip((kind.name for kind in PARTS), known.parts(), strict=True))
        news = {kind: new for kind, new in zip(PARTS, delta.parts(), strict=True) if new.count}
        if not news:
            return known
        for _ in range(_MAX_ATTEMPTS):
            raws = {kind.name: _encode(merged[kind.name].to_dict()) for kind in news}
            expected = {kind.name: synced.raw.get(kind.name, "") for kind in news}
            aside = {
                kind.name
                for kind in news
                if expected[kind.name] and not self._reads(kind, expected[kind.name])
            }
            current = await self._compare_and_set(subject, expected, raws, aside)
            if current is None:
                for name, raw in raws.items():
                    _remember(synced, name, raw)
                return Measurements(**merged)  # type: ignore[arg-type]  # each is of its kind
            for kind, new in news.items():
                raw = current[kind.name]
                if raw != expected[kind.name]:
                    stored = _decode_part(kind, raw, subject)
                    if stored is not None:
                        merged[kind.name] = stored.merged(new)  # type: ignore[arg-type]  # both are of this kind
                    _remember(synced, kind.name, raw)
            await sleep(random.uniform(0, 0.01))
        raise StoreUnavailableError("too many writers merge into one subject")

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
            aside = {_POLICY} if expected and stored is None else set()
            current = await self._compare_and_set(subject, {_POLICY: expected}, {_POLICY: raw}, aside)
            if current is None:
                _remember(synced, _POLICY, raw)
                await self._note(subject, raw)
                return policy
            expected = current[_POLICY]
            await sleep(random.uniform(0, 0.01))
        raise StoreUnavailableError("too many writers publish for one subject")

    async def _note(self, subject: Subject, raw: str) -> None:
        """Put a published policy in front of the history."""
        arguments = [self._ttl_ms, raw, str(MAX_HISTORY)]
        keys = [subject.redis_key(_HISTORY)]
        await self._redis.run(lambda client: self._append.run(client, keys, arguments))

    async def load_history(self, subject: Subject) -> list[dict[str, Any]]:
        """Policies that were published, newest first; each is `PublishedPolicy.to_dict` and ``written_at``.

        Raises:
            StoreUnavailableError: Redis is gone.
        """
        key = subject.redis_key(_HISTORY)
        raws: list[Any] = await self._redis.run(lambda client: client.lrange(key, 0, MAX_HISTORY - 1))
        values = [_decode(_HISTORY, raw, subject) for raw in raws]
        return [value for value in values if value is not None]

    @staticmethod
    def _reads(kind: type[Part], raw: str) -> bool:
        try:
            value = json.loads(raw)
            kind.from_dict(value)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return False
        return bool(value.get("schema_version") == SCHEMA_VERSION)

    async def _compare_and_set(
        self, subject: Subject, expected: Mapping[str, str], values: Mapping[str, str], aside: Set[str]
    ) -> dict[str, str] | None:
        """Set all; None when they were set, else what is there instead (empty for nothing)."""
        keys = [subject.redis_key(name) for name in values]
        arguments = [self._ttl_ms]
        for name, value in values.items():
            arguments += [expected[name], value, "1" if name in aside else "0"]
        answer: list[Any] = await self._redis.run(lambda client: self._swap.run(client, keys, arguments))
        if int(answer[0]) == 1:
            return None
        return dict(zip(values, (str(value) for value in answer[1:]), strict=True))


class Script:
    """A Lua script of this package, run by its digest; sent whole only to a server that does not know it."""

    def __init__(self, name: str) -> None:
        self._text = (resources.files(__package__) / name).read_text(encoding="utf-8")
        self._digest = hashlib.sha1(self._text.encode(), usedforsecurity=False).hexdigest()

    async def run(self, client: Any, keys: Sequence[str], arguments: Sequence[str]) -> Any:
        """Run it; what it returns."""
        try:
            return await client.evalsha(self._digest, len(keys), *keys, *arguments)
        except NoScriptError:
            return await client.eval(self._text, len(keys), *keys, *arguments)


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
    except (ValueError, KeyError, TypeError, AttributeError) as error:
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
    except (ValueError, KeyError, TypeError, AttributeError) as error:
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
