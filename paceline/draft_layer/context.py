"""Keys and values of context rows: features that layers attend to and do not transform (DFlash, 2602.06036, section 3).

A context row has no query and passes through no block, so each layer computes its keys and values once and keeps them
in its cache. This file describes the products and runs them in torch operators; `paceline.cpu.context` runs them on the
CPU kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.draft_layer.protocol import join_rows
from paceline.model.block import BlockShape
from paceline.model.device import Device
from paceline.model.norm import RmsNorm
from paceline.model.projection import Projection
from paceline.model.rope import RopeTable
from paceline.model.torch_block import rotate
from paceline.target.kv.slot import Slot


@dataclass(frozen=True, slots=True)
class ContextWeights:
    """What makes keys and values of features, layer by layer.

    Attributes:
        norm: `[hidden]`, of the features.
        keys_values: of each layer, `[2 * num_kv_heads * head_dim, hidden]`.
        key_norms: of each layer, `[num_kv_heads, head_dim]`, or None.
        shape: of the layers' blocks.
        rope: rotary table of all layers.
        max_positions: positions that the table must cover.
    """

    norm: Tensor
    keys_values: tuple[Projection, ...]
    key_norms: tuple[Tensor | None, ...]
    shape: BlockShape
    rope: RopeTable
    max_positions: int


@dataclass(slots=True)
class ContextRows:
    """New context rows of one sequence.

    Attributes:
        slot: its cache; the rows are written behind its settled ones.
        features: `[n, hidden]`, of the positions from `slot.length` on.
    """

    slot: Slot
    features: Tensor


class ContextWriter(Protocol):
    """Writes keys and values of context rows in every layer."""

    def write(self, rows: Sequence[ContextRows]) -> None:
        """Write rows of several sequences; the caller settles them."""


class TorchContext:
    """The products in torch operators; see :class:`ContextWriter`."""

    def __init__(self, weights: ContextWeights, device: Device) -> None:
        where, shape = device.torch_device, weights.shape
        self._where, self._shape, self._rope = where, shape, weights.rope
        self._norm = RmsNorm(weights.norm.to(where), shape.norm_eps)
        self._keys_values = [device.pack(x.weight, x.bias) for x in weights.keys_values]
        self._key_norms = [None if norm is None else norm.to(where) for norm in weights.key_norms]

    def write(self, rows: Sequence[ContextRows]) -> None:
        """Write rows; see :class:`ContextWriter`."""
        counts = [part.features.shape[0] for part in rows]
        starts = [part.slot.length for part in rows]
        positions = [start + i for start, count in zip(starts, counts, strict=True) for i in range(count)]
        rope = self._rope.gather(torch.tensor(positions, device=self._where), max(positions))
        features = self._norm(join_rows([part.features for part in rows]))
        kv_heads = self._shape.num_kv_heads
        for layer, (project, norm) in enumerate(zip(self._keys_values, self._key_norms, strict=True)):
            keys_values = project(features).view(-1, 2 * kv_heads, self._shape.head_dim)
            rotate(keys_values.narrow(1, 0, kv_heads), rope, norm, self._shape.norm_eps)
            for part, start, own in zip(rows, starts, keys_values.split(counts), strict=True):
                part.slot.append(layer, start, own)
