"""The tensors of the draft layer of EAGLE-1 and EAGLE-2 (2401.15077, section 4.1), and what kind of layer they make.

`fc` joins the token's embedding and a feature. One decoder block without a norm before its attention follows. The
target's own head reads the result as it is: the layer predicts what the target's final norm will give.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.draft_layer import Entry, LayerWeights
from paceline.methods.checkpoint import DrafterConfig
from paceline.methods.decoder_block import block_shapes, read_block, rope_table
from paceline.methods.target_vocabulary import SharedVocabulary, map_shapes
from paceline.model.projection import Projection

BLOCK = "layers.0."


def parameter_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Tensors of a checkpoint by their public names (docs/methods/eagle1.md), and a map of the vocabulary."""
    d = config.size("hidden")
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (d, 2 * d)}
    if config.flag("fc_bias"):
        shapes["fc.bias"] = (d,)
    return shapes | block_shapes(config, BLOCK, d) | map_shapes(config)


def read_layer(
    config: DrafterConfig, tensors: Mapping[str, Tensor], vocabulary: SharedVocabulary, dtype: torch.dtype
) -> LayerWeights:
    """The layer of a checkpoint; embedding and head are the target's."""
    bias = tensors["fc.bias"].to(dtype) if config.flag("fc_bias") else None
    return LayerWeights(
        entry=Entry(vocabulary.embedding, join=Projection(tensors["fc.weight"].to(dtype), bias)),
        blocks=(read_block(config, tensors, BLOCK, dtype, has_input_norm=False),),
        head=vocabulary.head,
        head_norm=None,
        carries_norm=False,
        rope=rope_table(config, dtype, vocabulary.embedding.device),
        max_positions=config.size("max_positions"),
    )
