"""EAGLE-1 (Li et al., 2401.15077): one decoder layer that predicts the target's next feature, for the target's head.

Turns a checkpoint into a layer, a tap and a rule for trees; `AutoregressiveDrafter` does the drafting. The feature is
the output of the target's final norm, sent without a projection. Trees have a static shape (`static_rule.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

import torch

from paceline.draft_layer import MAX_BEST
from paceline.methods.autoregressive.drafter import AutoregressiveDrafter
from paceline.methods.autoregressive.static_rule import StaticRule
from paceline.methods.autoregressive.tree_rule import TreeRule
from paceline.methods.backend import make_layer
from paceline.methods.checkpoint import CheckpointError, DrafterConfig, load_tensors
from paceline.methods.eagle1.layer import parameter_shapes, read_layer
from paceline.methods.target_vocabulary import SharedVocabulary
from paceline.target import Device, TapSpec


class Eagle1Drafter(AutoregressiveDrafter):
    """Drafts with an EAGLE-1 layer; see `paceline.methods.drafter.Drafter`."""

    method: ClassVar[str] = "eagle1"

    @classmethod
    def read_tap(cls, directory: Path, config: DrafterConfig) -> TapSpec:
        """The target's final norm."""
        return TapSpec(norm_final=True)

    @classmethod
    def tree_rule(cls, config: DrafterConfig) -> TreeRule:
        """A static shape: the best for the accuracies in the checkpoint, else the reference tree."""
        return StaticRule(rank_accuracies(config))

    @classmethod
    def load(
        cls, directory: Path, config: DrafterConfig, target_dir: Path, device: Device, dtype: torch.dtype
    ) -> Self:
        """Load a checkpoint; embedding and head are the target's own."""
        rule = cls.tree_rule(config)
        with torch.inference_mode():
            tensors = load_tensors(directory, parameter_shapes(config))
            vocabulary = SharedVocabulary.read(config, tensors, target_dir, device.torch_device, dtype)
            return cls(
                make_layer(read_layer(config, tensors, vocabulary, dtype), device),
                vocabulary.draft_ids,
                vocabulary.size,
                cls.read_tap(directory, config),
                config.size("max_positions"),
                rule,
                device,
            )


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
