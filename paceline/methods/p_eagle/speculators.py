"""P-EAGLE in the speculators format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.methods.checkpoint import CheckpointError, DrafterConfig
from paceline.methods.eagle.speculators import write_fused_fields
from paceline.methods.p_eagle.drafter import p_eagle_shapes
from paceline.methods.speculators.fields import is_whole, mask_token, switch
from paceline.methods.speculators.kind import TapKind


def _read_fields(content: Mapping[str, Any], vocab: int) -> dict[str, Any]:
    return {
        "norm_before_residual": switch(content, "norm_before_residual"),
        "num_depths": _num_depths(content),
        "mask_token": mask_token(content, vocab),
    }


def _write_fields(config: DrafterConfig) -> dict[str, Any]:
    return write_fused_fields(config, trains_embedding=True) | {"mask_token_id": config.shape["mask_token"]}


def _num_drafts(config: DrafterConfig) -> int:
    return config.size("num_depths")


def _num_depths(content: Mapping[str, Any]) -> int:
    """Depths of training: a field of older files, else the tokens of the default proposal."""
    for name in ("num_depths", "para_depths"):
        if is_whole(content.get(name)):
            return int(content[name])
    settings = content.get("speculators_config")
    methods = settings.get("proposal_methods") if isinstance(settings, Mapping) else None
    if isinstance(methods, list) and methods and isinstance(methods[0], Mapping):
        count = methods[0].get("speculative_tokens")
        if isinstance(count, int) and is_whole(count):
            return count
    raise CheckpointError(
        "speculators_config.proposal_methods names no speculative_tokens: how long are its drafts?"
    )


KIND = TapKind(
    name="peagle",
    method="p_eagle",
    architecture="PEagleDraftModel",
    shapes=p_eagle_shapes,
    read_fields=_read_fields,
    write_fields=_write_fields,
    num_drafts=_num_drafts,
    keeps_embedding=True,
)
