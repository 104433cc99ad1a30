"""What a method declares of itself for the speculators format, and the kinds that all methods declare.

`Method.speculators` names a declaration. Called by `config.py` and `layout.py`, which name no method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.methods.checkpoint import DrafterConfig
from paceline.methods.layouts.layout import Checkpoint
from paceline.methods.layouts.target_facts import TargetFacts
from paceline.methods.method import load_reference
from paceline.methods.registry import METHODS


@dataclass(frozen=True, slots=True)
class TapKind:
    """A drafter that reads fused layers of the target.

    Attributes:
        name: its `speculators_model_type`.
        method: Paceline's name.
        architecture: class of the package speculators.
        shapes: tensors of a checkpoint by Paceline's names.
        read_fields: fields of `shape` that this kind has, from a `config.json` and the size of the target's vocabulary.
        write_fields: the same fields for a `config.json`.
        num_drafts: tokens that a drafter proposes by default.
        is_block: whether it proposes a block, in layers with norms of queries and keys, with the target's embedding and
            head.
        keeps_embedding: whether its embedding is stored even where it equals the target's.
    """

    name: str
    method: str
    architecture: str
    shapes: Callable[[DrafterConfig], dict[str, tuple[int, ...]]]
    read_fields: Callable[[Mapping[str, Any], int], dict[str, Any]]
    write_fields: Callable[[DrafterConfig], dict[str, Any]]
    num_drafts: Callable[[DrafterConfig], int]
    is_block: bool = False
    keeps_embedding: bool = False


@dataclass(frozen=True, slots=True)
class OwnKind:
    """A drafter whose files have fields and tensors of their own; nothing of the target is stored.

    Attributes:
        name: its `speculators_model_type`.
        method: Paceline's name.
        read: from a directory, its `config.json` and the target.
        write: to a directory.
    """

    name: str
    method: str
    read: Callable[[Path, Mapping[str, Any], TargetFacts], Checkpoint]
    write: Callable[[Path, DrafterConfig, Mapping[str, Tensor]], None]


def tap_kinds() -> dict[str, TapKind]:
    """Kinds that read fused layers, by name."""
    return {kind.name: kind for kind in _declared() if isinstance(kind, TapKind)}


def own_kinds() -> dict[str, OwnKind]:
    """Kinds with files of their own, by name."""
    return {kind.name: kind for kind in _declared() if isinstance(kind, OwnKind)}


def kind_of(method: str) -> TapKind | OwnKind | None:
    """The kind that a method declares, if it does."""
    return next((kind for kind in _declared() if kind.method == method), None)


def _declared() -> list[TapKind | OwnKind]:
    return [
        load_reference(method.speculators) for method in METHODS.values() if method.speculators is not None
    ]
