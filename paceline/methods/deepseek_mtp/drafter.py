"""DeepSeek-V3's multi-token prediction as a drafter (2412.19437, section 2.2), and its relatives of the same layout.

Turns a checkpoint into modules and a tap; `AutoregressiveDrafter` does the drafting. The first module reads the
target's last hidden state: after its final norm or, if the checkpoint says so, before it.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

import torch

from paceline.draft_layer import DraftLayer
from paceline.methods.autoregressive.drafter import AutoregressiveDrafter
from paceline.methods.autoregressive.tree_rule import DynamicRule
from paceline.methods.backend import make_layer
from paceline.methods.checkpoint import DrafterConfig, load_tensors
from paceline.methods.deepseek_mtp.layer import parameter_shapes, read_modules
from paceline.methods.deepseek_mtp.modules import ModuleSequence
from paceline.methods.target_vocabulary import SharedVocabulary
from paceline.target import Device, TapSpec


class DeepseekMtpDrafter(AutoregressiveDrafter):
    """Drafts with multi-token prediction modules; see `paceline.methods.drafter.Drafter`."""

    method: ClassVar[str] = "deepseek_mtp"

    @classmethod
    def read_tap(cls, directory: Path, config: DrafterConfig) -> TapSpec:
        """The target's final norm, or with `shape.reads_residual` the stream that enters it."""
        if config.flag("reads_residual"):
            return TapSpec(layers=(config.size("target_layers"),))
        return TapSpec(norm_final=True)

    @classmethod
    def load(
        cls, directory: Path, config: DrafterConfig, target_dir: Path, device: Device, dtype: torch.dtype
    ) -> Self:
        """Load a checkpoint; embedding and head are the target's own."""
        with torch.inference_mode():
            tensors = load_tensors(directory, parameter_shapes(config))
            vocabulary = SharedVocabulary.read(config, tensors, target_dir, device.torch_device, dtype)
            modules = read_modules(config, tensors, vocabulary, dtype)
            layer: DraftLayer
            layer = make_layer(modules[0], device) if len(modules) == 1 else ModuleSequence(modules, device)
            return cls(
                layer,
                vocabulary.draft_ids,
                vocabulary.size,
                cls.read_tap(directory, config),
                config.size("max_positions"),
                DynamicRule(),
                device,
                len(modules),
            )
