"""Fields of the speculators format that drafters with EAGLE-3's fused layer have."""

from __future__ import annotations

from typing import Any

from paceline.methods.checkpoint import DrafterConfig


def write_fused_fields(config: DrafterConfig, trains_embedding: bool) -> dict[str, Any]:
    """Where the fused layer norms, and whether the drafter trains its embedding, for a `config.json` of the format."""
    return {
        "norm_before_residual": config.flag("norm_before_residual"),
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": config.flag("norm_output"),
        "embed_requires_grad": trains_embedding,
    }
