"""The EAGLE-3 draft layer (Li et al., 2503.01840, section 3): its tensors and its forward pass in torch operators.

One decoder block whose attention reads the token's embedding and a feature side by side, each normalised, with a head
of its own over a reduced vocabulary. Knows nothing of chains, trees or commits; called by `paceline.drafters.eagle3`.
Where the CPU kernels run it, `eagle3_native.py` stands in its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.drafters.checkpoint import CheckpointError, DrafterConfig
from paceline.drafters.decoder_block import BlockWeights, DecoderBlock, block_shapes
from paceline.drafters.draft_layer import LayerOutput, Rows, TorchOutput, join_rows
from paceline.target import Device
from paceline.target.device import RmsNorm


def parameter_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Tensors of a checkpoint by their public names (see docs/methods/eagle3.md)."""
    d, target = config.size("hidden"), config.size("target_hidden")
    vocab, draft_vocab = config.size("target_vocab"), config.size("draft_vocab")
    return {
        "fc.weight": (d, len(tap_layers(config)) * target),
        "midlayer.input_layernorm.weight": (target,),
        "midlayer.hidden_norm.weight": (d,),
        **block_shapes(config, "midlayer.", target + d),
        "norm.weight": (d,),
        "lm_head.weight": (draft_vocab, d),
        "d2t": (draft_vocab,),
        "t2d": (vocab,),
    }


def tap_layers(config: DrafterConfig) -> tuple[int, ...]:
    layers = config.shape.get("tap_layers")
    if not isinstance(layers, list) or not layers or not all(isinstance(i, int) and i >= 0 for i in layers):
        raise CheckpointError("shape.tap_layers must list the target layers whose incoming streams are read")
    return tuple(layers)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Tensors and sizes of the layer, not yet packed.

    Attributes:
        block: attention and gated product; attention reads `[norm(embedding) ; norm(state)]`.
        embedding: the target's, `[target_vocab, target_hidden]`.
        embed_norm: `[target_hidden]`.
        state_norm: `[hidden]`.
        final_norm: `[hidden]`, before the head.
        head: `[draft_vocab, hidden]`.
    """

    block: BlockWeights
    embedding: Tensor
    embed_norm: Tensor
    state_norm: Tensor
    final_norm: Tensor
    head: Tensor

    @classmethod
    def read(
        cls, config: DrafterConfig, tensors: Mapping[str, Tensor], embedding: Tensor, dtype: torch.dtype
    ) -> LayerWeights:
        """Take sizes from the checkpoint's config."""
        return cls(
            block=BlockWeights.read(config, tensors, "midlayer.", dtype, embedding.device),
            embedding=embedding,
            embed_norm=tensors["midlayer.input_layernorm.weight"].to(dtype),
            state_norm=tensors["midlayer.hidden_norm.weight"].to(dtype),
            final_norm=tensors["norm.weight"].to(dtype),
            head=tensors["lm_head.weight"].to(dtype),
        )


class Eagle3Layer:
    """The layer in torch operators, with products packed for the device."""

    def __init__(self, weights: LayerWeights, device: Device) -> None:
        block = weights.block
        self.hidden, self.dtype = block.hidden, block.dtype
        self.num_kv_heads, self.head_dim = block.num_kv_heads, block.head_dim
        self.where = device.torch_device
        self.embedding = weights.embedding
        self.block = DecoderBlock(block, device)
        self.head = device.pack(weights.head)
        self.embed_norm, self.state_norm, self.final_norm = (
            RmsNorm(weight.to(self.where), block.eps)
            for weight in (weights.embed_norm, weights.state_norm, weights.final_norm)
        )

    def forward(self, rows: Sequence[Rows], wanted: Sequence[int]) -> LayerOutput:
        """Run rows of several sequences; see :class:`paceline.drafters.draft_layer.DraftLayer`."""
        tokens = torch.tensor([token for part in rows for token in part.tokens], device=self.where)
        state = join_rows([part.states for part in rows])  # [n, hidden]
        embedded = self.embed_norm(F.embedding(tokens, self.embedding))
        joined = torch.cat((embedded, self.state_norm(state)), dim=-1)  # [n, target_hidden + hidden]
        state = self.block.forward(joined, state, rows)
        asked = state if len(wanted) == state.shape[0] else state[list(wanted)]
        return TorchOutput(state, self.head(self.final_norm(asked)).float())
