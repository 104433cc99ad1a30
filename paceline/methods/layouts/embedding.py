"""Adds the target's embedding to a drafter, for other programs that load its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from paceline.methods.checkpoint import DrafterConfig
from paceline.methods.layouts.target_facts import TargetFacts


def store_embedding(
    config: DrafterConfig, tensors: Mapping[str, Tensor], target_dir: Path
) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Add the target's token embedding to a drafter that has none of its own.

    Args:
        config: of the drafter; one that also reads the target's output head is returned unchanged.
        tensors: of the drafter.
        target_dir: the target.
    """
    if "embed_tokens.weight" in tensors or "lm_head.weight" not in tensors:
        return config, dict(tensors)
    embedding = TargetFacts.read(target_dir).embedding(tensors["lm_head.weight"].dtype)
    stored = replace(config, shape={**config.shape, "has_embedding": True})
    return stored, {**tensors, "embed_tokens.weight": embedding}
