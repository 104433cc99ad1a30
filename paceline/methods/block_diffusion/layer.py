"""DFlash's draft layer (2602.06036, section 3): its tensors, and how a block of rows is run.

Each block of the layer attends over keys and values of two kinds. Those of the *context* are products of the target's
fused features (`paceline.draft_layer.context`). Those of the *block* come from rows of embeddings that the layer
transforms, and within a block every row sees every other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.draft_layer import DraftLayer, Entry, LayerOutput, LayerWeights, Rows
from paceline.draft_layer.context import ContextRows, ContextWeights, ContextWriter
from paceline.methods.checkpoint import CheckpointError, DrafterConfig
from paceline.methods.decoder_block import block_shapes, read_block, rope_table
from paceline.model.block import BlockWeights
from paceline.model.projection import Projection
from paceline.target.kv.slot import Slot


def dflash_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Tensors of a checkpoint by their public names (see docs/methods/dflash.md).

    Embedding and head are the target's unless `shape.has_embedding` and `shape.has_head` say that there are own ones.

    Raises:
        CheckpointError: a width that is not the target's.
    """
    d, vocab, draft_vocab = config.size("hidden"), config.size("target_vocab"), config.size("draft_vocab")
    if config.size("target_hidden") != d:
        raise CheckpointError(
            "shape.hidden must equal shape.target_hidden: embedding and head are the target's"
        )
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (d, len(config.tap_layers()) * d),
        "hidden_norm.weight": (d,),
        "norm.weight": (d,),
        "d2t": (draft_vocab,),
        "t2d": (vocab,),
    }
    for index in range(config.size("num_layers")):
        prefix = f"layers.{index}."
        shapes |= {prefix + "input_layernorm.weight": (d,), **block_shapes(config, prefix, d)}
    if config.flag("has_embedding"):
        shapes["embed_tokens.weight"] = (vocab, d)
    if config.flag("has_head"):
        shapes["lm_head.weight"] = (draft_vocab, d)
    return shapes


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """How a block is laid out.

    Attributes:
        size: rows of a block: the anchor, which is the last committed token, and mask rows behind it.
        mask_token: id whose embedding stands in a mask row.
        anchor_first: every row proposes the token behind its own position, the anchor included. Otherwise every mask
            row proposes the token at its own position, and the anchor proposes nothing.
    """

    size: int
    mask_token: int
    anchor_first: bool

    @classmethod
    def read(cls, config: DrafterConfig) -> BlockPlan:
        """From `shape.block_size`, `mask_token` and `anchor_first`.

        Raises:
            CheckpointError: a block that proposes nothing, or a mask that is no token of the target's.
        """
        size, anchor_first = config.size("block_size"), config.flag("anchor_first")
        if size + anchor_first < 2:
            raise CheckpointError("shape.block_size 1 leaves nothing to propose: it must be at least 2")
        token, vocab = config.shape.get("mask_token"), config.size("target_vocab")
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
            raise CheckpointError(f"shape.mask_token must be a token from 0 to {vocab - 1}, not {token!r}")
        return cls(size, token, anchor_first)

    @property
    def num_drafts(self) -> int:
        """Tokens that a block proposes."""
        return self.size - (not self.anchor_first)


def read_layer(
    config: DrafterConfig, tensors: Mapping[str, Tensor], embedding: Tensor, head: Tensor, dtype: torch.dtype
) -> tuple[LayerWeights, ContextWeights]:
    """The layer of a checkpoint and what writes its context; embedding and head are those to be used, in `dtype`."""
    blocks = tuple(
        read_block(config, tensors, f"layers.{i}.", dtype, has_input_norm=True)
        for i in range(config.size("num_layers"))
    )
    rope, max_positions = rope_table(config, dtype, embedding.device), config.size("max_positions")
    layer = LayerWeights(
        entry=Entry(embedding, reads_state=False),
        blocks=blocks,
        head=head,
        head_norm=tensors["norm.weight"].to(dtype),
        carries_norm=True,
        rope=rope,
        max_positions=max_positions,
    )
    context = ContextWeights(
        norm=tensors["hidden_norm.weight"].to(dtype),
        keys_values=tuple(_keys_values(block) for block in blocks),
        key_norms=tuple(
            None if block.qk_norm is None else block.qk_norm[block.shape.num_heads :].contiguous()
            for block in blocks
        ),
        shape=layer.shape,
        rope=rope,
        max_positions=max_positions,
    )
    return layer, context


def _keys_values(block: BlockWeights) -> Projection:
    """A block's projection to keys and values alone: context rows have no queries."""
    first, bias = block.shape.query_width, block.qkv.bias
    return Projection(block.qkv.weight[first:], None if bias is None else bias[first:])


@dataclass(slots=True)
class BlockRows:
    """One sequence's part of a pass.

    Attributes:
        slot: its cache, which holds earlier context; the pass writes behind that. The caller settles the new context
            after the pass.
        context: `[n, hidden]` fused features of the positions from `slot.length` on, up to the anchor's.
        anchor: the last committed token, at position `slot.length + n`.
    """

    slot: Slot
    context: Tensor
    anchor: int


class DFlashLayer:
    """Context and block of several sequences in one pass.

    Args:
        layer: runs the blocks.
        context: writes the context; on the same backend as `layer`.
        plan: how a block is laid out.
        num_layers: of the cache slots.
    """

    def __init__(self, layer: DraftLayer, context: ContextWriter, plan: BlockPlan, num_layers: int) -> None:
        self.hidden, self.dtype, self.where = layer.hidden, layer.dtype, layer.where
        self.num_kv_heads, self.head_dim = layer.num_kv_heads, layer.head_dim
        self.values_are_keys = layer.values_are_keys
        self.num_layers = num_layers
        self.plan = plan
        self._layer = layer
        self._context = context

    def forward(self, rows: Sequence[BlockRows]) -> LayerOutput:
        """Run a block for each of several sequences.

        Room for `n + block_size` rows behind each slot's length has been reserved.

        Returns:
            Final-norm outputs and logits of the rows that propose, `num_drafts` of each sequence.
        """
        if fresh := [ContextRows(part.slot, part.context) for part in rows if part.context.shape[0]]:
            self._context.write(fresh)
        size, masks = self.plan.size, [self.plan.mask_token] * (self.plan.size - 1)
        no_states = torch.empty(size, 0, dtype=self.dtype, device=self.where)  # rows begin at embeddings
        blocks = []
        for part in rows:
            part.slot.num_pending = part.context.shape[0]
            first = part.slot.length + part.context.shape[0]
            tokens, positions = [part.anchor, *masks], range(first, first + size)
            blocks.append(Rows(part.slot, tokens, no_states, positions, sees_all=True))
        skipped = size - self.plan.num_drafts
        selected = [i * size + row for i in range(len(rows)) for row in range(skipped, size)]
        try:
            return self._layer.forward(blocks, selected).with_states_of(selected)
        finally:
            for part in rows:
                part.slot.num_pending = 0
