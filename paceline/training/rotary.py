"""Rotary position tables for the differentiable forwards of training. Pure; called by the objectives."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_tables(
    theta: float, head_dim: int, start: int, count: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[count, 1, head_dim]`` for positions from ``start`` on, halves repeated as Llama does."""
    inv_freq = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(start, start + count, dtype=torch.float64)[:, None] * inv_freq
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns ``x`` ``[..., heads, head_dim]`` by its positions' angles."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin
