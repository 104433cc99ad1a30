"""Fields of the speculators format that drafters of a block have: how the block is laid out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.methods.block_diffusion.layer import BlockPlan
from paceline.methods.checkpoint import CheckpointError, DrafterConfig
from paceline.methods.speculators.fields import is_whole, mask_token, switch


def read_block_fields(content: Mapping[str, Any], vocab: int) -> dict[str, Any]:
    """The layout of a block, as in Paceline's `shape`.

    Raises:
        CheckpointError: naming the field.
    """
    size = content.get("block_size", 8)
    if not is_whole(size):
        raise CheckpointError(f"block_size must be a positive whole number, not {size!r}")
    return {
        "block_size": size,
        "anchor_first": switch(content, "sample_from_anchor"),
        "mask_token": mask_token(content, vocab),
    }


def write_block_fields(config: DrafterConfig) -> dict[str, Any]:
    """The same fields for a `config.json` of the format.

    Raises:
        CheckpointError: a block that cannot be laid out.
    """
    plan = BlockPlan.read(config)
    return {
        "block_size": plan.size,
        "sample_from_anchor": plan.anchor_first,
        "mask_token_id": plan.mask_token,
        "sliding_window_non_causal": False,
    }


def num_block_drafts(config: DrafterConfig) -> int:
    """Tokens that a block proposes."""
    return BlockPlan.read(config).num_drafts
