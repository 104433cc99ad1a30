"""What a draft layer consists of: how tokens and features enter it, its blocks, and the head behind them.

One description covers EAGLE-1 and EAGLE-3, P-EAGLE, a DeepSeek prediction module and DFlash. A method says what differs
and nothing else. This file computes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from paceline.model.block import BlockShape, BlockWeights
from paceline.model.projection import Projection
from paceline.model.rope import RopeTable


class Residual(Enum):
    """What the first block adds its attention to."""

    ENTERED = "entered"  # what attention reads, before the block's own norm
    STATE = "state"
    NORMED_STATE = "normed state"


@dataclass(frozen=True, slots=True)
class Entry:
    """How a row enters the first block, from its token and its state: a target feature, or an output of the layer.

    The entry norms embedding and state where there are norms, puts them side by side, and multiplies by `join`. What it
    gives is what attention reads.

    Attributes:
        embedding: `[vocab, embedding_width]`.
        embedding_norm: `[embedding_width]`, or None.
        reads_state: False enters the embedding alone.
        state_norm: `[hidden]`, or None.
        join: `[hidden, embedding_width + hidden]`, embedding first; None passes both on side by side.
        residual: what the first block adds its attention to.
    """

    embedding: Tensor
    embedding_norm: Tensor | None = None
    reads_state: bool = True
    state_norm: Tensor | None = None
    join: Projection | None = None
    residual: Residual = Residual.ENTERED


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """A draft layer, not yet packed for a device.

    Attributes:
        entry: what comes before the blocks.
        blocks: at least one, in order, all of one shape; the first may read something wider than the residual stream.
        head: `[draft_vocab, hidden]`.
        head_norm: `[hidden]`, before the head, or None.
        carries_norm: whether the layer continues from its output behind `head_norm`, and not before it.
        rope: rotary table of all blocks.
        max_positions: positions that the table must cover.
    """

    entry: Entry
    blocks: tuple[BlockWeights, ...]
    head: Tensor
    head_norm: Tensor | None
    carries_norm: bool
    rope: RopeTable
    max_positions: int

    @property
    def shape(self) -> BlockShape:
        """Of the blocks."""
        return self.blocks[0].shape

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights and of the activations."""
        return self.blocks[0].dtype
