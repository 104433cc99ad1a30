"""The DFlash draft layers (2602.06036, section 3): their tensors and their forward pass in torch operators.

Every layer attends over keys and values of two kinds: those of the *context*, which are products of the target's fused
features alone, and those of the *block*, rows of embeddings that the layers transform. Context rows have no queries and
pass through no layer, so what a layer holds of them is computed once and stays in its cache. Within a block every row
sees every other.

Knows nothing of chains, trees or commits; called by `paceline.methods.one_pass.block_drafter`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.methods.checkpoint import CheckpointError, DrafterConfig
from paceline.methods.decoder_block import BlockWeights, block_shapes
from paceline.methods.draft_layer import LayerOutput, LayerSizes, TorchOutput, join_rows
from paceline.methods.eagle3.layer import tap_layers
from paceline.model.device import RmsNorm
from paceline.target import Device
from paceline.target.kv_cache import Slot


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
        "fc.weight": (d, len(tap_layers(config)) * d),
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
        anchor_first: whether every row proposes the token behind its own position, the anchor the first; else every
            mask row proposes the token at its own position, and the anchor nothing.
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
            raise CheckpointError("shape.block_size 1 leaves nothing to propose")
        token, vocab = config.shape.get("mask_token"), config.size("target_vocab")
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
            raise CheckpointError(f"shape.mask_token must be a token from 0 to {vocab - 1}, not {token!r}")
        return cls(size, token, anchor_first)

    @property
    def num_drafts(self) -> int:
        """Tokens that a block proposes."""
        return self.size - (not self.anchor_first)


@dataclass(frozen=True, slots=True)
class DFlashWeights:
    """Tensors of the layers, not yet packed.

    Attributes:
        norms: of each layer, `[hidden]`, before attention; block rows pass it, context rows do not.
        blocks: of each layer.
        context_norm: `[hidden]`, of fused features.
        final_norm: `[hidden]`.
        embedding: `[target_vocab, hidden]`.
        head: `[draft_vocab, hidden]`.
    """

    norms: tuple[Tensor, ...]
    blocks: tuple[BlockWeights, ...]
    context_norm: Tensor
    final_norm: Tensor
    embedding: Tensor
    head: Tensor

    @classmethod
    def read(
        cls,
        config: DrafterConfig,
        tensors: Mapping[str, Tensor],
        embedding: Tensor,
        head: Tensor,
        dtype: torch.dtype,
    ) -> DFlashWeights:
        """Take sizes from the checkpoint's config; embedding and head are those to be used, in `dtype`."""
        where, layers = embedding.device, range(config.size("num_layers"))
        return cls(
            tuple(tensors[f"layers.{i}.input_layernorm.weight"].to(dtype) for i in layers),
            tuple(BlockWeights.read(config, tensors, f"layers.{i}.", dtype, where) for i in layers),
            tensors["hidden_norm.weight"].to(dtype),
            tensors["norm.weight"].to(dtype),
            embedding,
            head,
        )


@dataclass(slots=True)
class BlockRows:
    """One sequence's part of a pass.

    Attributes:
        slot: its cache, with the context that was run before; the rest is written behind it. Nothing is settled:
            that is the caller's, once the pass is done.
        context: `[n, hidden]` fused features of the positions from `slot.length` on, up to the anchor's.
        anchor: the last committed token; it stands at position `slot.length + n`.
    """

    slot: Slot
    context: Tensor
    anchor: int


class InjectedBlock:
    """One layer in torch operators, with products packed for the device.

    Args:
        weights: of the layer.
        norm: `[hidden]`, before attention.
        device: where it runs.
        index: layer of the cache slots.
    """

    def __init__(self, weights: BlockWeights, norm: Tensor, device: Device, index: int) -> None:
        self._index, self._eps = index, weights.eps
        self._scale, self._head_dim = weights.scale, weights.head_dim
        self._num_heads, self._num_kv_heads = weights.num_heads, weights.num_kv_heads
        self._group = weights.num_heads // weights.num_kv_heads
        where, split = device.torch_device, weights.num_heads * weights.head_dim
        bias = None if weights.qkv_bias is None else weights.qkv_bias.to(where)
        # Context rows have keys and values alone, so these are a product of their own.
        self._query = device.pack(weights.qkv[:split], None if bias is None else bias[:split])
        self._key_value = device.pack(weights.qkv[split:], None if bias is None else bias[split:])
        norms = None if weights.head_norms is None else weights.head_norms.to(where)
        self._query_norm = None if norms is None else norms[: weights.num_heads]
        self._key_norm = None if norms is None else norms[weights.num_heads :]
        self._out, self._down = device.pack(weights.out), device.pack(weights.down)
        self._gate_up = device.pack(weights.gate_up)
        self._norm, self._mlp_norm = (RmsNorm(x.to(where), weights.eps) for x in (norm, weights.mlp_norm))

    def forward(
        self, state: Tensor, contexts: Sequence[Tensor], slots: Sequence[Slot], rope: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Run blocks of several sequences, writing keys and values of new context rows, and of the block behind them.

        Args:
            state: block rows, `[sequences * block_size, hidden]`.
            contexts: normed features of each sequence's new context rows, `[n, hidden]`.
            slots: the sequences' caches.
            rope: cosines and signed sines, `[rows, 1, head_dim]`, of each sequence's new context rows and then its
                block rows, sequences in order.

        Returns:
            `[sequences * block_size, hidden]`.
        """
        read = self._norm(state)
        size = state.shape[0] // len(slots)
        parts = [part for pair in zip(contexts, read.split(size), strict=True) for part in pair]
        key_value = self._key_value(torch.cat(parts)).view(-1, 2 * self._num_kv_heads, self._head_dim)
        self._turn(key_value.narrow(1, 0, self._num_kv_heads), self._key_norm, *rope)
        queries = self._query(read).view(-1, self._num_heads, self._head_dim)
        own: list[int] = []  # rows of `key_value` that belong to blocks
        first = 0
        for context in contexts:
            own += range(first + context.shape[0], first + context.shape[0] + size)
            first += context.shape[0] + size
        self._turn(queries, self._query_norm, rope[0][own], rope[1][own])
        mixed, first = [], 0
        for i, (slot, context) in enumerate(zip(slots, contexts, strict=True)):
            count = context.shape[0] + size
            slot.append(self._index, slot.length, key_value[first : first + count])
            first += count
            keys, values = slot.view(self._index, 0, slot.length + count)
            # Query heads that share a key head become rows of it. Nothing is hidden from a block, so nothing is masked.
            asked = queries[i * size : (i + 1) * size]
            asked = asked.view(size, self._num_kv_heads, self._group, self._head_dim).transpose(0, 1)
            asked = asked.reshape(1, self._num_kv_heads, size * self._group, self._head_dim)
            out = F.scaled_dot_product_attention(asked, keys, values, scale=self._scale)
            mixed.append(out.view(self._num_kv_heads, size, -1).transpose(0, 1).reshape(size, -1))
        state = self._out.add(join_rows(mixed), state)
        gate, up = self._gate_up(self._mlp_norm(state)).chunk(2, dim=-1)
        return self._down.add(F.silu(gate).mul_(up), state)

    def _turn(self, heads: Tensor, norm: Tensor | None, cos: Tensor, sin: Tensor) -> None:
        """Norm heads where the checkpoint does, and rotate them, in place."""
        if norm is not None:
            heads.copy_(F.rms_norm(heads, (self._head_dim,), None, self._eps).mul_(norm))
        swapped = heads.roll(self._head_dim // 2, -1)
        heads.mul_(cos).addcmul_(swapped, sin)


class BlockLayer(LayerSizes, Protocol):
    """All layers, between the target's embedding and a head, whatever they run on.

    Attributes:
        num_layers: of the cache slots.
        plan: how a block is laid out.
    """

    num_layers: int
    plan: BlockPlan

    def forward(self, rows: Sequence[BlockRows]) -> LayerOutput:
        """Run a block for each of several sequences.

        Room for `n + block_size` rows behind each slot's length has been reserved.

        Returns:
            Final-norm outputs and logits of the rows that propose, `num_drafts` of each sequence.
        """


class DFlashLayer:
    """All layers in torch operators; see :class:`BlockLayer`."""

    def __init__(self, weights: DFlashWeights, plan: BlockPlan, device: Device) -> None:
        block = weights.blocks[0]
        self.hidden, self.dtype = block.hidden, block.dtype
        self.num_kv_heads, self.head_dim = block.num_kv_heads, block.head_dim
        self.where = device.torch_device
        self.num_layers = len(weights.blocks)
        self.plan = plan
        self._rope = block.rope
        self._embedding = weights.embedding
        self._blocks = [
            InjectedBlock(w, norm, device, i)
            for i, (w, norm) in enumerate(zip(weights.blocks, weights.norms, strict=True))
        ]
        self._context_norm, self._final_norm = (
            RmsNorm(x.to(self.where), block.eps) for x in (weights.context_norm, weights.final_norm)
        )
        self._head = device.pack(weights.head)

    def forward(self, rows: Sequence[BlockRows]) -> LayerOutput:
        """Run a block for each of several sequences; see :class:`BlockLayer`."""
        size = self.plan.size
        contexts = [self._context_norm(part.context) for part in rows]
        tokens = torch.full((len(rows), size), self.plan.mask_token, device=self.where)
        tokens[:, 0] = torch.tensor([part.anchor for part in rows], device=self.where)
        state = F.embedding(tokens.flatten(), self._embedding)
        positions = [
            position
            for part in rows
            for position in range(part.slot.length, part.slot.length + part.context.shape[0] + size)
        ]
        rope = self._rope.gather(torch.tensor(positions, device=self.where), max(positions))
        slots = [part.slot for part in rows]
        for block in self._blocks:
            state = block.forward(state, contexts, slots, rope)
        proposing = state.view(len(rows), size, -1)[:, size - self.plan.num_drafts :]
        states = self._final_norm(proposing.reshape(-1, self.hidden))
        return TorchOutput(states, self._head(states).float())
