"""EAGLE-3 in the speculators format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.methods.checkpoint import DrafterConfig
from paceline.methods.eagle.fused_layer import parameter_shapes
from paceline.methods.eagle.speculators import write_fused_fields
from paceline.methods.speculators.fields import switch
from paceline.methods.speculators.kind import TapKind

_NUM_DRAFTS = 3
"""Tokens that an exported file proposes; a layer that continues from its own output has no length of its own."""


def _read_fields(content: Mapping[str, Any], vocab: int) -> dict[str, Any]:
    return {name: switch(content, name) for name in ("norm_before_residual", "norm_output")}


def _write_fields(config: DrafterConfig) -> dict[str, Any]:
    return write_fused_fields(config, trains_embedding=False)


def _num_drafts(config: DrafterConfig) -> int:
    return _NUM_DRAFTS


KIND = TapKind(
    name="eagle3",
    method="eagle3",
    architecture="Eagle3DraftModel",
    shapes=parameter_shapes,
    read_fields=_read_fields,
    write_fields=_write_fields,
    num_drafts=_num_drafts,
)
