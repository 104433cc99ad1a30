"""Fields of the speculators format that only block drafters have: a block's layout, and DSpark's heads.

Reads and writes these fields of `config.json`. Called by `config.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.methods.block_diffusion.layer import BlockPlan
from paceline.methods.checkpoint import CheckpointError, DrafterConfig
from paceline.methods.dspark.heads import HeadPlan
from paceline.methods.speculators.fields import is_whole, mask_token, switch


def read_block_fields(content: Mapping[str, Any], kind: str, vocab: int) -> dict[str, Any]:
    """The layout of a block and DSpark's heads, as in Paceline's `shape`.

    Raises:
        CheckpointError: naming the field.
    """
    size = content.get("block_size", 8)
    if not is_whole(size):
        raise CheckpointError(f"block_size must be a positive whole number, not {size!r}")
    if kind == "dspark" and "sample_from_anchor" not in content:
        raise CheckpointError(
            "sample_from_anchor is missing: older files mean false by that and newer ones true; add which it is"
        )
    shape: dict[str, Any] = {
        "block_size": size,
        "anchor_first": switch(content, "sample_from_anchor"),
        "mask_token": mask_token(content, vocab),
    }
    if kind == "dflash":
        return shape
    head, rank = content.get("markov_head_type", "vanilla"), content.get("markov_rank", 256)
    if not is_whole(rank):
        raise CheckpointError(f"markov_rank must be a positive whole number, not {rank!r}")
    shape |= {
        "markov_head": head,
        "markov_rank": rank,
        "confidence_head": switch(content, "enable_confidence_head", True),
        "confidence_reads_token": switch(content, "confidence_head_with_markov", True),
    }
    _check_recurrent(shape)
    return shape


def write_block_fields(config: DrafterConfig, kind: str) -> dict[str, Any]:
    """The same fields for a `config.json` of the format.

    Raises:
        CheckpointError: naming what the format cannot express.
    """
    plan = BlockPlan.read(config)
    fields: dict[str, Any] = {
        "block_size": plan.size,
        "sample_from_anchor": plan.anchor_first,
        "mask_token_id": plan.mask_token,
        "sliding_window_non_causal": False,
    }
    if kind == "dflash":
        return fields
    _check_recurrent(config.shape)
    heads = HeadPlan.read(config)
    return fields | {
        "markov_head_type": heads.markov.value,
        "markov_rank": heads.rank,
        "enable_confidence_head": heads.has_confidence,
        "confidence_head_with_markov": heads.confidence_reads_token,
    }


def _check_recurrent(shape: Mapping[str, Any]) -> None:
    """The package's recurrent head visits the anchor's row even if that row proposes nothing; Paceline's does not."""
    if shape.get("markov_head") == "rnn" and not shape.get("anchor_first"):
        raise CheckpointError(
            "markov_head_type 'rnn' is not computed in blocks whose anchor proposes nothing"
        )
