"""What Medusa's heads take from their target and its measurements: the tap, the LM head, accuracies by rank."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from paceline.methods.checkpoint import CheckpointError, DrafterConfig
from paceline.methods.medusa_heads.heads import MAX_RANKS, MedusaShape
from paceline.methods.static_tree import prior_accuracies
from paceline.model.weights import SafetensorsDir
from paceline.target import TapSpec

TAP = TapSpec(norm_final=True, last_only=True)
"""What the LM head reads, only of the newest position: `hidden` numbers a round, however much was committed."""


def read_target_head(target_dir: Path, shape: MedusaShape, dtype: torch.dtype) -> Tensor:
    """The target's LM head `[target_vocab, hidden]`; its embedding if the target ties them.

    Raises:
        CheckpointError: the head has another shape than the drafter was made for.
    """
    with SafetensorsDir(target_dir) as weights:
        name = "lm_head.weight" if "lm_head.weight" in weights else "model.embed_tokens.weight"
        head = weights.get(name, dtype)
    if tuple(head.shape) != (shape.target_vocab, shape.hidden):
        raise CheckpointError(
            f"the target's LM head is {tuple(head.shape)}, not {(shape.target_vocab, shape.hidden)}"
        )
    return head


def read_accuracies(config: DrafterConfig, shape: MedusaShape) -> tuple[tuple[float, ...], ...]:
    """How often the token of each rank of each head is right; a prior if the checkpoint has none.

    Raises:
        CheckpointError: the checkpoint's accuracies are not probabilities by head and rank.
    """
    ranks = min(MAX_RANKS, shape.draft_vocab)
    found = config.shape.get("accuracies")
    if found is None:
        return prior_accuracies(shape.num_heads, ranks)
    is_table = (
        isinstance(found, list)
        and len(found) == shape.num_heads
        and all(
            isinstance(row, list)
            and 1 <= len(row) <= MAX_RANKS
            and all(isinstance(x, int | float) and 0.0 <= x <= 1.0 for x in row)
            for row in found
        )
    )
    if not is_table:
        raise CheckpointError(
            f"shape.accuracies must list, for each of {shape.num_heads} heads, up to {MAX_RANKS} probabilities"
        )
    return tuple(tuple(float(x) for x in row[:ranks]) for row in found)
