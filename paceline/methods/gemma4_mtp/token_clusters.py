"""Tokens in clusters of equal size, so that an output head can score a few clusters in place of all tokens.

First k-means on the rows of an output table, with equal sizes; then centroids that predict the largest logit of their
cluster. Pure; called when a drafter with a clustered head is exported (`ClusteredHead` reads the result).
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.contract.errors import TrainingDataError

_CHUNK_ROWS = 8192
_ROUNDS = 4
_STATES_AT_A_TIME = 128  # each of them has a quarter of a million logits
_RIDGE = 1e-3  # of the states' mean square


def check_clusters(vocab: int, num_clusters: int, num_selected: int) -> None:
    """Check a run's options of its head before it trains; with ``num_clusters`` 0 there are no clusters.

    Raises:
        TrainingDataError: clusters of equal size are impossible, or more would be scored than exist; says what is
            possible.
    """
    if not num_clusters:
        return
    if vocab % num_clusters:
        below = next(n for n in range(min(num_clusters, vocab), 0, -1) if vocab % n == 0)
        above = next((n for n in range(num_clusters, vocab) if vocab % n == 0), vocab)
        near = " or ".join(str(n) for n in sorted({below, above}))
        raise TrainingDataError(
            f"num_clusters {num_clusters} must divide {vocab} tokens: take {near}, or 0 for a dense head"
        )
    if num_selected > num_clusters:
        raise TrainingDataError(f"num_selected {num_selected} must be at most num_clusters {num_clusters}")


def cluster_tokens(table: Tensor, num_clusters: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Cluster the rows of a table.

    Args:
        table: ``[vocab, width]``.
        num_clusters: divides the vocabulary.
        seed: chooses the rows at which centroids begin.

    Returns:
        Centroids float32 ``[num_clusters, width]``, and token ids int64 ``[vocab]``, cluster by cluster.

    Raises:
        TrainingDataError: clusters of equal size are impossible.
    """
    vocab = table.shape[0]
    if num_clusters < 1 or vocab % num_clusters:
        raise TrainingDataError(f"num_clusters {num_clusters} must divide {vocab} tokens")
    rows, size = table.float(), vocab // num_clusters
    random = torch.Generator().manual_seed(seed)
    centroids = rows[torch.randperm(vocab, generator=random)[:num_clusters]].clone()
    owner = torch.empty(0, dtype=torch.int64)
    for _ in range(_ROUNDS):
        owner = _assign(rows, centroids, size)
        sums = torch.zeros_like(centroids).index_add_(0, owner, rows)
        centroids = sums / size
    return centroids, owner.argsort(stable=True)


def fit_centroids(states: Tensor, table: Tensor, order: Tensor, num_clusters: int) -> Tensor:
    """Centroids whose product with a state is nearest to the largest logit in their cluster, in least squares.

    Means of a cluster's rows predict its mean logit, but the likeliest token is in the cluster with the largest one.
    For an assistant of Gemma 3 270M the best eight of 2,048 clusters contain that token in 31 % of held-out states by
    their means, and in 98 % by these centroids.

    Args:
        states: ``[n, width]``, inputs of the head during training; several times as many as their width, or the
            centroids overfit.
        table: ``[vocab, width]``.
        order: token ids int64 ``[vocab]``, cluster by cluster.
        num_clusters: number of clusters.

    Returns:
        float32 ``[num_clusters, width]``.
    """
    states, rows = states.float(), table.float()
    squares = states.T @ states
    products = torch.zeros(num_clusters, states.shape[1])
    for part in states.split(_STATES_AT_A_TIME):
        logits = part @ rows.T
        best = logits[:, order].unflatten(1, (num_clusters, -1)).amax(-1)  # [part, num_clusters]
        products += best.T @ part
    ridge = (_RIDGE * squares.diagonal().mean()).clamp(min=1e-12)
    centroids: Tensor = torch.linalg.solve(squares + ridge * torch.eye(len(squares)), products.T)
    return centroids.T


def _assign(rows: Tensor, centroids: Tensor, size: int) -> Tensor:
    """The cluster of each row, int64 ``[rows]``, ``size`` each: nearest rows first; a row whose cluster is full takes
    the next."""
    owner = torch.full((rows.shape[0],), -1)
    room = torch.full((centroids.shape[0],), size)
    half = centroids.square().sum(-1) / 2
    while len(left := (owner < 0).nonzero().squeeze(1)):
        open_ = room.nonzero().squeeze(1)
        closeness, wanted = [], []
        for part in left.split(_CHUNK_ROWS):
            best = (rows[part] @ centroids[open_].T - half[open_]).max(-1)
            closeness.append(best.values - rows[part].square().sum(-1) / 2)
            wanted.append(open_[best.indices])
        near, cluster = torch.cat(closeness), torch.cat(wanted)
        order = near.argsort(descending=True, stable=True)
        order = order[cluster[order].argsort(stable=True)]  # by cluster, the nearest of each first
        sorted_clusters = cluster[order]
        begins = torch.searchsorted(sorted_clusters, torch.arange(len(room)))
        rank = torch.arange(len(order)) - begins[sorted_clusters]
        taken = rank < room[sorted_clusters]
        owner[left[order[taken]]] = sorted_clusters[taken]
        room -= torch.bincount(sorted_clusters[taken], minlength=len(room))
    return owner
