"""Single fields of the speculators format, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.methods.checkpoint import CheckpointError


def mask_token(content: Mapping[str, Any], vocab: int) -> int:
    """The token that represents one that is not known yet.

    Raises:
        CheckpointError: no token is named, or the target has no such token.
    """
    for name in ("mask_token_id", "ptd_token_id"):
        token = content.get(name)
        if token is None:
            continue
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
            raise CheckpointError(f"{name} must be a token from 0 to {vocab - 1}, not {token!r}")
        return token
    raise CheckpointError("neither mask_token_id nor ptd_token_id names the mask token")


def switch(content: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """A field that is true or false.

    Raises:
        CheckpointError: the value is neither.
    """
    value = content.get(name, default)
    if not isinstance(value, bool):
        raise CheckpointError(f"{name} must be true or false, not {value!r}")
    return value


def size_of(layer: Any, name: str) -> int:
    """A size of the decoder layers' configuration.

    Raises:
        CheckpointError: it is missing, or is not a positive whole number.
    """
    value = getattr(layer, name, None)
    if not isinstance(value, int) or not is_whole(value):
        raise CheckpointError(
            f"transformer_layer_config.{name} must be a positive whole number, not {value!r}"
        )
    return value


def is_whole(value: object) -> bool:
    """Whether it is a positive whole number."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
