"""The EAGLE-1 draft layer (Li et al., 2401.15077, section 4.1): its tensors and its forward pass in torch operators.

`fc` joins the token's embedding and a feature, one decoder block without a norm before its attention follows, and the
target's own head reads the result as it is: the layer predicts what the target's final norm will give. Knows nothing
of chains, trees or commits; called by `paceline.methods.eagle1.drafter`. Where the CPU kernels run it,
`eagle1_native.py` stands in its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.methods.checkpoint import DrafterConfig
from paceline.methods.decoder_block import BlockWeights, DecoderBlock, block_shapes
from paceline.methods.draft_layer import LayerOutput, Rows, TorchOutput, join_rows
from paceline.methods.target_vocabulary import SharedVocabulary, map_shapes
from paceline.target import Device

BLOCK = "layers.0."


def parameter_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Tensors of a checkpoint by their public names (docs/methods/eagle1.md), and a map of the vocabulary."""
    d = config.size("hidden")
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (d, 2 * d)}
    if config.flag("fc_bias"):
        shapes["fc.bias"] = (d,)
    return shapes | block_shapes(config, BLOCK, d) | map_shapes(config)


@dataclass(frozen=True, slots=True)
class Eagle1Weights:
    """Tensors and sizes of the layer, not yet packed.

    Attributes:
        block: attention and gated product; attention reads what `fc` gives.
        embedding: the target's, `[vocab, hidden]`.
        head: the target's, of the tokens that are proposed: `[draft_vocab, hidden]`.
        fc: `[hidden, 2 * hidden]`, for `[embedding ; feature]`.
        fc_bias: `[hidden]` or None.
    """

    block: BlockWeights
    embedding: Tensor
    head: Tensor
    fc: Tensor
    fc_bias: Tensor | None

    @classmethod
    def read(
        cls,
        config: DrafterConfig,
        tensors: Mapping[str, Tensor],
        vocabulary: SharedVocabulary,
        dtype: torch.dtype,
    ) -> Eagle1Weights:
        """Take sizes from the checkpoint's config."""
        return cls(
            block=BlockWeights.read(config, tensors, BLOCK, dtype, vocabulary.embedding.device),
            embedding=vocabulary.embedding,
            head=vocabulary.head,
            fc=tensors["fc.weight"].to(dtype),
            fc_bias=tensors["fc.bias"].to(dtype) if config.flag("fc_bias") else None,
        )


class Eagle1Layer:
    """The layer in torch operators, with products packed for the device."""

    def __init__(self, weights: Eagle1Weights, device: Device) -> None:
        block = weights.block
        self.hidden, self.dtype = block.hidden, block.dtype
        self.num_kv_heads, self.head_dim = block.num_kv_heads, block.head_dim
        self.where = device.torch_device
        self.embedding = weights.embedding
        bias = None if weights.fc_bias is None else weights.fc_bias.to(self.where)
        self.fc = device.pack(weights.fc, bias)
        self.block = DecoderBlock(block, device)
        self.head = device.pack(weights.head)

    def forward(self, rows: Sequence[Rows], wanted: Sequence[int]) -> LayerOutput:
        """Run rows of several sequences; see :class:`paceline.methods.draft_layer.DraftLayer`."""
        tokens = torch.tensor([token for part in rows for token in part.tokens], device=self.where)
        feature = join_rows([part.states for part in rows])  # [n, hidden]
        joined = torch.cat((F.embedding(tokens, self.embedding), feature), dim=-1)
        entered = self.fc(joined)  # [n, hidden]
        state = self.block.forward(entered, entered, rows)
        asked = state if len(wanted) == state.shape[0] else state[list(wanted)]
        return TorchOutput(state, self.head(asked).float())
