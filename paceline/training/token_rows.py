"""Which rows of a batch have a loss over the vocabulary, and the loss of a drafter that is run on its own outputs.

Logits are expensive, so a few rows drawn at random may replace all of them. Pure but for torch's random state, which a
run's checkpoint keeps. Called by the objectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from paceline.training.data import Batch

RowLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(states [n, hidden], row [n], position [n])`` to a mean loss: what the head reads, and where the target chose."""


def drawn(where: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Rows and positions of ``where`` ``[rows, length]``, int64 ``[n]`` each: ``count`` at random; 0 takes all."""
    row, position = where.nonzero(as_tuple=True)
    if count and count < row.numel():
        some = torch.randperm(row.numel())[:count]
        return row[some], position[some]
    return row, position


def depth_weights(steps: int, decay: float) -> list[float]:
    """Weights of depths: each is ``decay`` times the one before, and they sum to one (2509.18362; 2412.19437 has 1)."""
    weights = [decay**j for j in range(steps)]
    return [weight / sum(weights) for weight in weights]


def depth_loss(
    batch: Batch, outputs: Iterable[Tensor], weights: Sequence[float], count: int, row_loss: RowLoss
) -> tuple[Tensor, dict[str, float]]:
    """Weighted sum over depths of the mean loss of rows that propose an answer's token, and each depth's mean.

    Args:
        batch: texts.
        outputs: what the head reads at each depth, ``[rows, length, hidden]``. Row ``r`` at depth ``j`` proposes token
            ``r + 2 + j``, which the target chose at position ``r + 1 + j``.
        weights: of the depths.
        count: rows of each depth, drawn at random; 0 takes all.
        row_loss: of some rows.
    """
    total, shown = torch.zeros(()), {}
    for j, (out, weight) in enumerate(zip(outputs, weights, strict=True)):
        row, position = drawn(batch.is_answer[:, 2 + j :], count)
        if row.numel():
            loss = row_loss(out[row, position], row, position + 1 + j)
            total = total + weight * loss
            shown[f"depth_{j + 1}"] = float(loss.detach())
    return total, shown
