"""Drafts with the layer of EAGLE-1 and EAGLE-2, which predicts the target's next feature, for the target's head.

Turns a checkpoint into a layer, a tap and a rule for trees; `AutoregressiveDrafter` does the drafting. The feature is
the output of the target's final norm, sent without a projection. The two methods differ in their trees.
"""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Self

import torch

from paceline.methods.autoregressive.drafter import AutoregressiveDrafter
from paceline.methods.autoregressive.tree_rule import TreeRule
from paceline.methods.backend import make_layer
from paceline.methods.checkpoint import DrafterConfig, load_tensors
from paceline.methods.eagle.feature_layer import parameter_shapes, read_layer
from paceline.methods.target_vocabulary import SharedVocabulary
from paceline.target import Device, TapSpec


class FeatureDrafter(AutoregressiveDrafter):
    """Drafts with a layer that predicts features; see `paceline.methods.drafter.Drafter`."""

    @classmethod
    def read_tap(cls, directory: Path, config: DrafterConfig) -> TapSpec:
        """The target's final norm."""
        return TapSpec(norm_final=True)

    @classmethod
    @abstractmethod
    def tree_rule(cls, config: DrafterConfig) -> TreeRule:
        """How the trees of a checkpoint grow.

        Raises:
            CheckpointError: the checkpoint cannot be used.
        """

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
