"""EAGLE-2 (Li et al., 2406.16858): EAGLE-1's layer with dynamic trees, which grow by its probabilities.

The weights and the tap are EAGLE-1's; a checkpoint's `method` says as which of the two it is served.
"""

from __future__ import annotations

from typing import ClassVar

from paceline.draft_layer import MAX_BEST
from paceline.methods.autoregressive.tree_rule import DynamicRule, TreeRule
from paceline.methods.checkpoint import DrafterConfig
from paceline.methods.eagle.feature_drafter import FeatureDrafter


class Eagle2Drafter(FeatureDrafter):
    """Drafts with EAGLE-1's layer and dynamic trees; see `paceline.methods.drafter.Drafter`."""

    method: ClassVar[str] = "eagle2"

    @classmethod
    def tree_rule(cls, config: DrafterConfig) -> TreeRule:
        """The likeliest nodes by the product of draft probabilities along their path."""
        return DynamicRule(MAX_BEST)
