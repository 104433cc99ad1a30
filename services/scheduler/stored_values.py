"""Values as Redis stores them: JSON objects with a schema version.

Responsible for: writing and reading the text of parts and policies. A value that cannot be read is logged, never fatal.

Deliberately does not know: Redis, when values are written. Called by services.scheduler.store.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

import structlog

from paceline.contract.policy import SpeculationPolicy
from services.scheduler.measurements import SCHEMA_VERSION, Part
from services.scheduler.subject import Subject

T = TypeVar("T")

POLICY = "policy"
_ENVELOPE = frozenset({"schema_version", "written_at"})
"""Fields that every stored value has beside its own."""

_log = structlog.get_logger()


def part_to_dict(part: Part) -> dict[str, Any]:
    """The layout of one part as Redis has it, without the time of writing."""
    return {"schema_version": SCHEMA_VERSION, **part.to_dict()}


def encode(value: Mapping[str, Any]) -> str:
    """The text of a value, with schema version and time of writing."""
    written_at = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({"schema_version": SCHEMA_VERSION, "written_at": written_at, **value}, allow_nan=False)


def _policy_of(value: Mapping[str, Any]) -> SpeculationPolicy:
    return SpeculationPolicy.from_dict(
        {name: stored for name, stored in value.items() if name not in _ENVELOPE}
    )


def read_part(kind: type[Part], raw: str | None, subject: Subject) -> Part | None:
    """A stored part; None, and a line in the log, if it cannot be read."""
    from_dict: Callable[[dict[str, Any]], Part] = kind.from_dict
    return _read(kind.name, from_dict, raw, subject)


def read_policy(raw: str | None, subject: Subject) -> SpeculationPolicy | None:
    """A stored policy; None, and a line in the log, if it cannot be read."""
    return _read(POLICY, _policy_of, raw, subject)


def _read(name: str, from_dict: Callable[[dict[str, Any]], T], raw: str | None, subject: Subject) -> T | None:
    value = decode(name, raw, subject)
    if value is None:
        return None
    try:
        return from_dict(value)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        _log.warning("stored value is not readable", part=name, model=subject.model_label, cause=str(error))
        return None


def decode(name: str, raw: str | None, subject: Subject) -> dict[str, Any] | None:
    """The object in a stored text; None, and a line in the log, if it has another layout."""
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


def is_part(kind: type[Part], raw: str) -> bool:
    """Whether a stored value can be read as a part."""
    try:
        value = json.loads(raw)
        kind.from_dict(value)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
    return bool(value.get("schema_version") == SCHEMA_VERSION)
