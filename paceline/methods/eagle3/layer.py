"""The EAGLE-3 draft layer (Li et al., 2503.01840, section 3): its tensors and its forward pass in torch operators.

One decoder block whose attention reads the token's embedding and a feature side by side, each normalised, with a head
of its own over a reduced vocabulary; public checkpoints may put plain blocks above it (`upper_block.py`). Knows nothing
of chains, trees or commits; called by `paceline.methods.eagle3.drafter` and `p_eagle`. Where the CPU kernels run it,
`eagle3_native.py` stands in its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.methods.checkpoint import CheckpointError, DrafterConfig
from paceline.methods.decoder_block import BlockWeights, DecoderBlock, block_shapes
from paceline.methods.draft_layer import LayerOutput, Rows, TorchOutput, join_rows
from paceline.methods.upper_block import UpperBlock, UpperWeights, num_layers, upper_shapes
from paceline.model.device import RmsNorm
from paceline.target import Device


def parameter_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Tensors of a checkpoint by their public names (see docs/methods/eagle3.md).

    The drafter's own embedding is among them where `shape.has_embedding` says so; else the target's is read.
    """
    d, target = config.size("hidden"), config.size("target_hidden")
    vocab, draft_vocab = config.size("target_vocab"), config.size("draft_vocab")
    own = {"embed_tokens.weight": (vocab, target)} if config.flag("has_embedding") else {}
    return {
        **own,
        "fc.weight": (d, len(tap_layers(config)) * target),
        "midlayer.input_layernorm.weight": (target,),
        "midlayer.hidden_norm.weight": (d,),
        **block_shapes(config, "midlayer.", target + d),
        **upper_shapes(config),
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


def read_draft_ids(config: DrafterConfig, offsets: Tensor, device: torch.device) -> Tensor | None:
    """Target id of each draft id, int64 `[draft_vocab]`; None where they are the same.

    Args:
        config: the checkpoint's.
        offsets: `d2t`, `[draft_vocab]`: target id less draft id.
        device: where the ids are used.

    Raises:
        CheckpointError: ids that are not the target's, or not distinct.
    """
    vocab = config.size("target_vocab")
    ids = offsets.to(torch.int64) + torch.arange(offsets.shape[0])
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(ids.unique()) < len(ids):
        raise CheckpointError("d2t does not map draft ids to distinct target ids")
    return None if len(ids) == vocab and not bool(offsets.any()) else ids.to(device)


@dataclass(frozen=True, slots=True)
class Eagle3Weights:
    """Tensors and sizes of the layer, not yet packed.

    Attributes:
        block: attention and gated product; attention reads `[norm(embedding) ; norm(state)]`.
        upper: plain blocks above it.
        embedding: the target's or the drafter's own, `[target_vocab, target_hidden]`.
        embed_norm: `[target_hidden]`.
        state_norm: `[hidden]`.
        final_norm: `[hidden]`, before the head.
        head: `[draft_vocab, hidden]`.
        adds_to_norm: whether the block's result is added to the normed state, and not to the state itself.
        goes_on_from_norm: whether the layer goes on from its output behind the final norm, and not before it.
    """

    block: BlockWeights
    upper: tuple[UpperWeights, ...]
    embedding: Tensor
    embed_norm: Tensor
    state_norm: Tensor
    final_norm: Tensor
    head: Tensor
    adds_to_norm: bool
    goes_on_from_norm: bool

    @classmethod
    def read(
        cls, config: DrafterConfig, tensors: Mapping[str, Tensor], embedding: Tensor, dtype: torch.dtype
    ) -> Eagle3Weights:
        """Take sizes from the checkpoint's config; `embedding` gives way to one of the drafter's own."""
        where = embedding.device
        if "embed_tokens.weight" in tensors:
            embedding = tensors["embed_tokens.weight"].to(where, dtype)
        return cls(
            block=BlockWeights.read(config, tensors, "midlayer.", dtype, where),
            upper=tuple(
                UpperWeights.read(config, tensors, index, dtype, where)
                for index in range(1, num_layers(config))
            ),
            embedding=embedding,
            embed_norm=tensors["midlayer.input_layernorm.weight"].to(dtype),
            state_norm=tensors["midlayer.hidden_norm.weight"].to(dtype),
            final_norm=tensors["norm.weight"].to(dtype),
            head=tensors["lm_head.weight"].to(dtype),
            adds_to_norm=config.flag("norm_before_residual"),
            goes_on_from_norm=config.flag("norm_output"),
        )


class Eagle3Layer:
    """The layer in torch operators, with products packed for the device."""

    def __init__(self, weights: Eagle3Weights, device: Device) -> None:
        block = weights.block
        self.hidden, self.dtype = block.hidden, block.dtype
        self.num_kv_heads, self.head_dim = block.num_kv_heads, block.head_dim
        self.where = device.torch_device
        self.embedding = weights.embedding
        self.block = DecoderBlock(block, device, is_last=not weights.upper)
        last = len(weights.upper)
        self.upper = [UpperBlock(w, device, i, i == last) for i, w in enumerate(weights.upper, start=1)]
        self.adds_to_norm, self.goes_on_from_norm = weights.adds_to_norm, weights.goes_on_from_norm
        self.head = device.pack(weights.head)
        self.embed_norm, self.state_norm, self.final_norm = (
            RmsNorm(weight.to(self.where), block.eps)
            for weight in (weights.embed_norm, weights.state_norm, weights.final_norm)
        )

    def forward(self, rows: Sequence[Rows], wanted: Sequence[int]) -> LayerOutput:
        """Run rows of several sequences; see :class:`paceline.methods.draft_layer.DraftLayer`."""
        tokens = torch.tensor([token for part in rows for token in part.tokens], device=self.where)
        state = join_rows([part.states for part in rows])  # [n, hidden]
        embedded = self.embed_norm(F.embedding(tokens, self.embedding))
        normed = self.state_norm(state)
        joined = torch.cat((embedded, normed), dim=-1)  # [n, target_hidden + hidden]
        state = self.block.forward(joined, normed if self.adds_to_norm else state, rows)
        for block in self.upper:
            state = block.forward(state, rows)
        if self.goes_on_from_norm:
            state = self.final_norm(state)
        asked = state if len(wanted) == state.shape[0] else state[list(wanted)]
        return TorchOutput(
            state, self.head(asked if self.goes_on_from_norm else self.final_norm(asked)).float()
        )
