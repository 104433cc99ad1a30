"""Rotary position tables, computed once and gathered per step.

A table holds the cosine and sine of every position in use. It does not know layers or heads. Executors and draft layers
gather from it once per step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FIRST_TABLE_POSITIONS = 2048


class RopeTable:
    """Cosine and signed sine per position, `rotate(x) = x * cos + roll(x, head_dim / 2) * sin`.

    Rolling by half a head swaps its halves; the minus sign of the usual rotate-half lives in the table.
    """

    def __init__(
        self, config: Any, key: str | None, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        entry = config.rope_parameters if key is None else config.rope_parameters[key]
        self._attention_factor = 1.0
        if entry["rope_type"] == "default":
            exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
            self._inv_freq = 1.0 / (entry["rope_theta"] ** exponents)
        else:
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            init = ROPE_INIT_FUNCTIONS[entry["rope_type"]]
            self._inv_freq, self._attention_factor = init(config, torch.device("cpu"), layer_type=key)
        self._dtype = dtype
        self._device = device
        self.table = torch.empty(0)
        self._extend(FIRST_TABLE_POSITIONS)

    def _extend(self, num_positions: int) -> None:
        # float32 angles cast at the end, as transformers does.
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * self._inv_freq[None, :].float()
        cos, sin = angles.cos() * self._attention_factor, angles.sin() * self._attention_factor
        table = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], dim=1)
        self.table = table.to(device=self._device, dtype=self._dtype)  # [positions, 2, head_dim]

    def cover(self, num_positions: int) -> None:
        """Extend the table to so many positions; `table` may be another tensor afterwards."""
        size = self.table.shape[0]
        while size < num_positions:
            size *= 2
        if size > self.table.shape[0]:
            self._extend(size)

    def gather(self, positions: Tensor, max_position: int) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine of `positions` `[n]`, none above `max_position`: each `[n, 1, head_dim]`."""
        self.cover(max_position + 1)
        cos, sin = self.table.index_select(0, positions).unsqueeze(2).unbind(1)
        return cos, sin


def rotation_at(
    theta: float, head_dim: int, start: int, count: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[count, 1, head_dim]`` of positions from ``start`` on, for :func:`rotate`; in training."""
    inv_freq = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(start, start + count, dtype=torch.float64)[:, None] * inv_freq
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates ``x`` ``[..., heads, head_dim]`` by its positions' angles, without writing into ``x``."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin
