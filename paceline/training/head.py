"""An output head over many rows, a few rows at a time, without gradients.

A whole logit matrix of a text and a vocabulary would not fit the cache. Pure functions; called by the objectives.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_ROWS = 128  # [128, 8192] float32 is 4 MiB: fits one core's part of the cache


def at_least_float32(x: Tensor) -> Tensor:
    """``x`` in float32, or as it is where its type is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@torch.no_grad()
def label_losses(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """``-log softmax(x W^T)`` at each row's label, float32 ``[rows]``; for measuring, without a gradient."""
    parts = [
        (x[s : s + CHUNK_ROWS] @ weight.T).float().log_softmax(-1).gather(1, labels[s : s + CHUNK_ROWS, None])
        for s in range(0, x.shape[0], CHUNK_ROWS)
    ]
    return -torch.cat(parts).squeeze(1) if parts else torch.empty(0)


def softmax_head(hidden: Tensor, weight: Tensor) -> Tensor:
    """``softmax(hidden W^T)`` in ``hidden``'s type, ``[rows, vocab]``, computed in float32 a few rows at a time."""
    out = hidden.new_empty(hidden.shape[0], weight.shape[0])
    for start in range(0, hidden.shape[0], CHUNK_ROWS):
        part = slice(start, start + CHUNK_ROWS)
        out[part] = at_least_float32(hidden[part] @ weight.T).softmax(-1)
    return out


def head_argmax(hidden: Tensor, weight: Tensor) -> Tensor:
    """``argmax(hidden W^T)`` per row, int64 ``[rows]``."""
    return head_best(hidden, weight, 1).squeeze(-1)


def head_best(hidden: Tensor, weight: Tensor, count: int) -> Tensor:
    """The ``count`` largest entries of ``hidden W^T`` per row, best first, int64 ``[rows, count]``."""
    parts = [
        (hidden[s : s + CHUNK_ROWS] @ weight.T).topk(count, dim=-1).indices
        for s in range(0, hidden.shape[0], CHUNK_ROWS)
    ]
    return torch.cat(parts) if parts else torch.empty(0, count, dtype=torch.int64)
