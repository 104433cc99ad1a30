"""The tensors of DeepSeek-V3's multi-token prediction modules (2412.19437, section 2.2), and what layers they make.

A module norms a token's embedding and the hidden state before it, each on its own, joins them (`eh_proj`, embedding
first), and runs one decoder block. A norm of the module's own and the target's head give the token after next. One
module is a draft layer like others; `modules.py` runs several in sequence.
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


def num_modules(config: DrafterConfig) -> int:
    """Modules of a checkpoint; one where nothing is said, as in all that were published with weights."""
    return config.size("num_modules") if "num_modules" in config.shape else 1


def module_prefix(index: int) -> str:
    """What the tensors' names of a module begin with; 0 for the first."""
    return f"layers.{index}."


def parameter_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Tensors of a checkpoint: public names, counted from the first module (docs/methods/deepseek_mtp.md), and the map
    of a part of the vocabulary.
    """
    d = config.size("hidden")
    shapes = map_shapes(config)
    for index in range(num_modules(config)):
        prefix = module_prefix(index)
        shapes |= {
            prefix + "enorm.weight": (d,),
            prefix + "hnorm.weight": (d,),
            prefix + "eh_proj.weight": (d, 2 * d),
            prefix + "input_layernorm.weight": (d,),
            **block_shapes(config, prefix, d),
            prefix + "shared_head.norm.weight": (d,),
        }
    return shapes


def read_modules(
    config: DrafterConfig, tensors: Mapping[str, Tensor], vocabulary: SharedVocabulary, dtype: torch.dtype
) -> tuple[LayerWeights, ...]:
    """The modules of a checkpoint, in sequence; embedding and head are the target's.

    `shape.carries_norm` says whether a module hands on its output behind its norm, as GLM does, or the block's raw
    output, as DeepSeek does.
    """
    rope = rope_table(config, dtype, vocabulary.embedding.device)

    def read(prefix: str) -> LayerWeights:
        embedding_norm, hidden_norm, join, head_norm = (
            tensors[f"{prefix}{name}.weight"].to(dtype)
            for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        )
        return LayerWeights(
            entry=Entry(vocabulary.embedding, embedding_norm, state_norm=hidden_norm, join=Projection(join)),
            blocks=(read_block(config, tensors, prefix, dtype, has_input_norm=True),),
            head=vocabulary.head,
            head_norm=head_norm,
            carries_norm=config.flag("carries_norm"),
            rope=rope,
            max_positions=config.size("max_positions"),
        )

    return tuple(read(module_prefix(index)) for index in range(num_modules(config)))
