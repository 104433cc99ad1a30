"""EAGLE-3 (Li et al., 2503.01840): one decoder layer over the target's fused features, drafting chains or trees.

Turns a checkpoint into a layer and a tap; `AutoregressiveDrafter` does the drafting. `fc` runs on the target's side
(the tap's projection), so features arrive at the drafter's width.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

import torch

from paceline.methods.autoregressive.drafter import AutoregressiveDrafter
from paceline.methods.autoregressive.tree_rule import DynamicRule
from paceline.methods.backend import make_layer
from paceline.methods.checkpoint import CheckpointError, DrafterConfig, load_tensor, load_tensors
from paceline.methods.eagle.fused_layer import parameter_shapes, read_layer
from paceline.model.weights import SafetensorsDir
from paceline.target import Device, TapSpec


class Eagle3Drafter(AutoregressiveDrafter):
    """Drafts with an EAGLE-3 layer; see `paceline.methods.drafter.Drafter`."""

    method: ClassVar[str] = "eagle3"

    @classmethod
    def read_tap(cls, directory: Path, config: DrafterConfig) -> TapSpec:
        """The tap of a checkpoint: its layers, fused by `fc` on the target's side."""
        return TapSpec(layers=config.tap_layers(), projection=load_tensor(directory, "fc.weight"))

    @classmethod
    def load(
        cls, directory: Path, config: DrafterConfig, target_dir: Path, device: Device, dtype: torch.dtype
    ) -> Self:
        """Load a checkpoint; the embedding is the target's own."""
        with torch.inference_mode():
            tensors = load_tensors(directory, parameter_shapes(config))
            with SafetensorsDir(target_dir) as weights:
                embedding = weights.get("model.embed_tokens.weight", dtype).to(device.torch_device)
            vocab, width = config.size("target_vocab"), config.size("target_hidden")
            if tuple(embedding.shape) != (vocab, width):
                raise CheckpointError(
                    f"the target's embedding is {tuple(embedding.shape)}, not {(vocab, width)}"
                )
            offsets = tensors["d2t"].to(torch.int64)  # target id - draft id
            draft_ids = offsets + torch.arange(offsets.shape[0])
            if (
                int(draft_ids.min()) < 0
                or int(draft_ids.max()) >= vocab
                or len(draft_ids.unique()) < len(draft_ids)
            ):
                raise CheckpointError("d2t does not map draft ids to distinct target ids")
            layer = read_layer(config, tensors, embedding, dtype)
            return cls(
                make_layer(layer, device),
                draft_ids.to(device.torch_device),
                len(draft_ids),
                TapSpec(layers=config.tap_layers(), projection=tensors["fc.weight"]),
                config.size("max_positions"),
                DynamicRule(),
                device,
                len(layer.blocks),
            )
