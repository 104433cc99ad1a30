"""DSpark in the speculators format: its block's fields, and those of its heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.methods.block_diffusion.speculators import (
    num_block_drafts,
    read_block_fields,
    write_block_fields,
)
from paceline.methods.checkpoint import CheckpointError, DrafterConfig
from paceline.methods.dspark.drafter import dspark_shapes
from paceline.methods.dspark.heads import HeadPlan
from paceline.methods.speculators.fields import is_whole, switch
from paceline.methods.speculators.kind import TapKind


def _read_fields(content: Mapping[str, Any], vocab: int) -> dict[str, Any]:
    if "sample_from_anchor" not in content:
        raise CheckpointError(
            "sample_from_anchor is missing: older files mean false by that and newer ones true; add which it is"
        )
    shape = read_block_fields(content, vocab)
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


def _write_fields(config: DrafterConfig) -> dict[str, Any]:
    fields = write_block_fields(config)
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


KIND = TapKind(
    name="dspark",
    method="dspark",
    architecture="DSparkDraftModel",
    shapes=dspark_shapes,
    read_fields=_read_fields,
    write_fields=_write_fields,
    num_drafts=num_block_drafts,
    is_block=True,
)
