"""EAGLE-1 (Li et al., 2401.15077): one decoder layer that predicts the target's next feature, for the target's head.

Trees have a static shape (`static_rule.py`).
"""

from __future__ import annotations

from typing import ClassVar

from paceline.draft_layer import MAX_BEST
from paceline.methods.autoregressive.static_rule import StaticRule
from paceline.methods.autoregressive.tree_rule import TreeRule
from paceline.methods.checkpoint import CheckpointError, DrafterConfig
from paceline.methods.eagle.feature_drafter import FeatureDrafter


class Eagle1Drafter(FeatureDrafter):
    """Drafts with an EAGLE-1 layer and static trees; see `paceline.methods.drafter.Drafter`."""

    method: ClassVar[str] = "eagle1"

    @classmethod
    def tree_rule(cls, config: DrafterConfig) -> TreeRule:
        """A static shape: the best for the accuracies in the checkpoint, else the reference tree."""
        return StaticRule(rank_accuracies(config))


def rank_accuracies(config: DrafterConfig) -> list[list[float]] | None:
    """By depth and rank, how often the target chooses that token if it chose the path before; None if unknown.

    Raises:
        CheckpointError: `shape.rank_accuracies` is not a table of fractions.
    """
    table = config.shape.get("rank_accuracies")
    if table is None:
        return None
    rows = table if isinstance(table, list) else []
    sound = all(
        isinstance(row, list)
        and 1 <= len(row) <= MAX_BEST
        and all(isinstance(share, int | float) and 0.0 <= share <= 1.0 for share in row)
        for row in rows
    )
    if not rows or not sound:
        raise CheckpointError(
            f"shape.rank_accuracies must list, by depth, the shares of the {MAX_BEST} likeliest tokens or fewer"
        )
    return [[float(share) for share in row] for row in rows]
