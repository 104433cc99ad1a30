"""Where training starts: random matrices, linear maps fitted on the text, and the scale of features.

A fitted start lets training begin at a drafter that already predicts. Called by the methods' ``start.py``; knows no
method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice

import torch
from torch import Tensor

from paceline.contract.errors import TrainingDataError
from paceline.training.data import Batch, Corpus
from paceline.training.shards import shard_indices

RIDGE = 1e-3
"""Penalty of a ridge regression, relative to the number of rows or to the mean square of inputs."""

_BATCHES = 8


def random_parameters(
    shapes: Mapping[str, tuple[int, ...]], seed: int, branch_scale: float = 1.0
) -> dict[str, Tensor]:
    """Matrices with entries of variance ``1 / inputs``, and ones for vectors, which are norms.

    Args:
        shapes: tensors by name. The order of names is that of the random numbers.
        seed: of the random numbers.
        branch_scale: factor on the output matrices of attention and MLP: a small one lets layers add little at first.
    """
    random = torch.Generator().manual_seed(seed)
    parameters: dict[str, Tensor] = {}
    for name, size in shapes.items():
        if len(size) == 1:
            parameters[name] = torch.ones(size)
            continue
        parameters[name] = torch.randn(size, generator=random) * size[1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameters[name] *= branch_scale
    return parameters


def solve_ridge(gram: Tensor, product: Tensor, penalty: float) -> Tensor:
    """The linear map of a ridge regression, float32 ``[outputs, inputs]``; solved in float64.

    Args:
        gram: ``[inputs, inputs]``, inputs by inputs, summed over rows.
        product: ``[inputs, outputs]``, inputs by outputs, summed over rows.
        penalty: added to the diagonal of ``gram``.
    """
    regular = gram.double() + torch.eye(gram.shape[0], dtype=torch.float64) * penalty
    solution: Tensor = torch.linalg.solve(regular, product.double())
    return solution.T.float()


def answer_transitions(batch: Batch, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows to fit a look-ahead on: wherever token ``r + 1`` is part of an answer and has features.

    Args:
        batch: texts. The last token of a text has no features.
        before: ``[rows, length, width]``, read at ``r``.
        after: ``[rows, length, width]``, read at ``r + 1``.

    Returns:
        Tokens ``r + 1`` int64 ``[n]``, ``before`` at ``r`` and ``after`` at ``r + 1``, float32 ``[n, width]`` each.
    """
    has_features = torch.arange(1, batch.tokens.shape[1])[None] < (batch.lengths - 1)[:, None]
    keep = batch.is_answer[:, 1:] & has_features
    return batch.tokens[:, 1:][keep], before[:, :-1][keep].float(), after[:, 1:][keep].float()


def answer_mean(corpus: Corpus, read: Callable[[Batch], Tensor]) -> Tensor:
    """Mean over the answer positions of the first batches, float32 ``[width]``.

    Args:
        corpus: texts.
        read: from a batch to ``[rows, length, width]``.

    Raises:
        TrainingDataError: there are no answers.
    """
    total, count = torch.zeros(()), 0
    for batch in islice(corpus.epoch(0, shard_indices(corpus.folder)[:1]), _BATCHES):
        taken = read(batch)[batch.is_answer].float()
        total = total + taken.sum(0)
        count += taken.shape[0]
    if not count:
        raise TrainingDataError(f"{corpus.folder}: no answers to start from")
    return total / count
