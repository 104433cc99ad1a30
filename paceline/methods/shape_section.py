"""An object within a checkpoint's `shape`, which has the fields of a dataclass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field
from typing import Any

from paceline.methods.checkpoint import CheckpointError, DrafterConfig

_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (float, int), "bool": (bool,), "str": (str,)}


def read_section(config: DrafterConfig, name: str, known: Sequence[Field[Any]]) -> dict[str, Any] | None:
    """The object's values by field; None if it is absent or null.

    Args:
        config: the checkpoint's.
        name: of the object.
        known: fields of the dataclass, of type int (from 0), float, bool or str.

    Raises:
        CheckpointError: it is no object, or a field is missing, unknown or of another type.
    """
    content = config.shape.get(name)
    if content is None:
        return None
    if not isinstance(content, Mapping):
        raise CheckpointError(f"shape.{name} must be an object, not {content!r}")
    by_name = {field.name: field for field in known}
    if unknown := sorted(set(content) - set(by_name)):
        raise CheckpointError(f"shape.{name}: unknown fields {', '.join(map(repr, unknown))}")
    for field in known:
        if field.name not in content:
            if field.default is MISSING:
                raise CheckpointError(f"shape.{name}.{field.name} is missing")
            continue
        value, kind = content[field.name], str(field.type)
        is_right = isinstance(value, _TYPES[kind]) and (kind == "bool" or not isinstance(value, bool))
        if not is_right or (kind == "int" and value < 0):
            raise CheckpointError(f"shape.{name}.{field.name} must be of type {kind}, not {value!r}")
    return dict(content)
