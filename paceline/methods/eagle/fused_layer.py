"""The tensors of the draft layer of EAGLE-3 (Li et al., 2503.01840, section 3), and what kind of layer they make.

The first block's attention reads the token's embedding and a feature side by side, each normed. Public checkpoints may
put plain blocks above it. A head of the layer's own gives logits over a reduced vocabulary. P-EAGLE has the same layer.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.draft_layer import Entry, LayerWeights
from paceline.draft_layer.weights import Residual
from paceline.methods.checkpoint import DrafterConfig
from paceline.methods.decoder_block import block_shapes, num_layers, read_block, rope_table


def parameter_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Tensors of a checkpoint by their public names (see docs/methods/eagle3.md).

    The drafter's own embedding is among them where `shape.has_embedding` says so; else the target's is read.
    """
    d, target = config.size("hidden"), config.size("target_hidden")
    vocab, draft_vocab = config.size("target_vocab"), config.size("draft_vocab")
    own = {"embed_tokens.weight": (vocab, target)} if config.flag("has_embedding") else {}
    return {
        **own,
        "fc.weight": (d, len(config.tap_layers()) * target),
        "midlayer.input_layernorm.weight": (target,),
        "midlayer.hidden_norm.weight": (d,),
        **block_shapes(config, "midlayer.", target + d),
        **_plain_block_shapes(config),
        "norm.weight": (d,),
        "lm_head.weight": (draft_vocab, d),
        "d2t": (draft_vocab,),
        "t2d": (vocab,),
    }


def _plain_block_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Tensors of the blocks above the first, which norm the residual stream and add to it."""
    d = config.size("hidden")
    shapes: dict[str, tuple[int, ...]] = {}
    for index in range(1, num_layers(config)):
        prefix = f"layers.{index}."
        shapes |= {prefix + "input_layernorm.weight": (d,), **block_shapes(config, prefix, d)}
    return shapes


def read_layer(
    config: DrafterConfig, tensors: Mapping[str, Tensor], embedding: Tensor, dtype: torch.dtype
) -> LayerWeights:
    """The layer of a checkpoint; a checkpoint's own embedding takes the place of `embedding`."""
    where = embedding.device
    if "embed_tokens.weight" in tensors:
        embedding = tensors["embed_tokens.weight"].to(where, dtype)
    blocks = [read_block(config, tensors, "midlayer.", dtype, has_input_norm=False)]
    for index in range(1, num_layers(config)):
        blocks.append(read_block(config, tensors, f"layers.{index}.", dtype, has_input_norm=True))
    return LayerWeights(
        entry=Entry(
            embedding,
            embedding_norm=tensors["midlayer.input_layernorm.weight"].to(dtype),
            state_norm=tensors["midlayer.hidden_norm.weight"].to(dtype),
            residual=Residual.NORMED_STATE if config.flag("norm_before_residual") else Residual.STATE,
        ),
        blocks=tuple(blocks),
        head=tensors["lm_head.weight"].to(dtype),
        head_norm=tensors["norm.weight"].to(dtype),
        carries_norm=config.flag("norm_output"),
        rope=rope_table(config, dtype, where),
        max_positions=config.size("max_positions"),
    )
