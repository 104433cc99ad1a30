"""What the commands read: Redis itself, or a scheduler.

Responsible for: finding subjects, and reading everything known about each. Deliberately does not know: how it
is printed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.contract.errors import InvalidRequestError, PacelineError, UnavailableError
from paceline.contract.policy import SpeculationPolicy
from paceline.embedded import record
from services.runtime.tls import Tls
from services.scheduler.measurements import PARTS, SCHEMA_VERSION, Measurements, Part
from services.scheduler.subject import Subject

DEFAULT_REDIS = "redis://127.0.0.1:6379/0"
_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Known:
    """Everything known about one subject.

    Attributes:
        values: parts as stored in Redis, by name, without those of another layout.
        policy: the policy in force, None where there is none.
        history: policies that were published, newest first.
    """

    subject: Subject
    measurements: Measurements
    values: Mapping[str, Any] = field(default_factory=dict)
    policy: Mapping[str, Any] | None = None
    history: tuple[Mapping[str, Any], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """A JSON value."""
        return {
            "key": asdict(self.subject),
            **self.values,
            "policy": self.policy,
            "policy_history": list(self.history),
        }


def read(redis: str | None, scheduler: str | None, model: str, tls: Tls) -> list[Known]:
    """Everything known, by subject.

    Args:
        redis: URL.
        scheduler: host:port. If neither is named, a deployment that runs here is asked, else the default Redis.
        model: start of the model fingerprints wanted; empty for all.
        tls: for the scheduler.

    Raises:
        InvalidRequestError: both sources are named, or neither is and several deployments run here.
        UnavailableError: the source cannot be reached.
    """
    if redis is not None and scheduler is not None:
        raise InvalidRequestError("redis", "name a Redis or a scheduler, not both")
    is_found = redis is None and scheduler is None
    if is_found:
        scheduler = _running_scheduler()
    if scheduler is not None:
        known = asyncio.run(_from_scheduler(scheduler, tls))
    else:
        try:
            known = _from_redis(redis or DEFAULT_REDIS)
        except UnavailableError as error:
            if not is_found:
                raise
            raise UnavailableError(
                f"no `paceline up` runs here, and {DEFAULT_REDIS} does not answer ({error}): "
                "pass --scheduler HOST:PORT or --redis URL"
            ) from error
    wanted = [one for one in known if one.subject.model_fingerprint.startswith(model)]
    return sorted(wanted, key=lambda one: tuple(asdict(one.subject).values()))


def _running_scheduler() -> str | None:
    """The scheduler of the `paceline up` that runs here; None if none does."""
    found = record.running()
    if len(found) > 1:
        listed = "".join(f"\n  {one}" for one in found)
        raise InvalidRequestError(
            "scheduler", f"several deployments run here: pass --scheduler HOST:PORT{listed}"
        )
    return found[0].scheduler if found else None


def _from_redis(url: str) -> list[Known]:
    import redis
    from redis import exceptions

    try:
        with redis.Redis.from_url(
            url, decode_responses=True, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S
        ) as client:
            subjects: dict[Subject, set[str]] = {}
            for key in client.scan_iter(match="paceline:v1:*", count=1000):
                found = Subject.from_redis_key(key)
                if found is not None:
                    subjects.setdefault(found[0], set()).add(found[1])
            known = []
            for subject, parts in subjects.items():
                values = {
                    name: _decoded(client.get(subject.redis_key(name)))
                    for name in parts
                    if name != "policy_history"
                }
                raws = (
                    client.lrange(subject.redis_key("policy_history"), 0, -1)
                    if "policy_history" in parts
                    else []
                )
                known.append(_known(subject, values, [_decoded(raw) for raw in raws]))
            return known
    except (exceptions.RedisError, OSError) as error:
        raise UnavailableError(f"redis: {type(error).__name__}: {error}") from error
    except ValueError as error:
        raise InvalidRequestError("redis", str(error)) from error


async def _from_scheduler(endpoint: str, tls: Tls) -> list[Known]:
    import grpc

    from paceline.v1 import scheduler_pb2, scheduler_pb2_grpc
    from services.runtime.channel import open_channel
    from services.runtime.error_mapping import from_rpc_error

    try:
        async with open_channel(endpoint, tls if tls.ca is not None else None) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            listed = await stub.ListSubjects(scheduler_pb2.ListSubjectsRequest(), timeout=_TIMEOUT_S)
            known = []
            for key in listed.keys:
                snapshot = await stub.Snapshot(scheduler_pb2.SnapshotRequest(key=key), timeout=_TIMEOUT_S)
                values = json.loads(snapshot.measurements_json)
                history = values.pop("policy_history", [])
                policy = SpeculationPolicy.from_proto(snapshot.policy).to_dict()
                known.append(_known(Subject.from_proto(key), {**values, "policy": policy}, history))
            return known
    except grpc.aio.AioRpcError as error:
        cause = from_rpc_error(error)
        raise cause if isinstance(cause, PacelineError) else UnavailableError(str(cause)) from error


def _known(subject: Subject, values: dict[str, Any], history: list[Any]) -> Known:
    policy = values.get("policy")
    parts: dict[str, Part] = {}
    shown: dict[str, Any] = {}
    for kind in PARTS:
        value = values.get(kind.name)
        try:
            if not isinstance(value, dict) or value.get("schema_version") != SCHEMA_VERSION:
                continue
            parts[kind.name] = kind.from_dict(value)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # another layout, or none: treated as absent
        shown[kind.name] = value
    return Known(
        subject,
        Measurements(**parts),  # type: ignore[arg-type]  # each is of its kind
        shown,
        policy if isinstance(policy, dict) else None,
        tuple(entry for entry in history if isinstance(entry, dict)),
    )


def _decoded(raw: Any) -> Any:
    try:
        return json.loads(raw or "null")
    except ValueError:
        return None
