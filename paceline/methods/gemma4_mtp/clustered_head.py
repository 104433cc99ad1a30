"""The assistant's clustered output head, which scores the tokens of few clusters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class ClusteredHead:
    """An output head that scores only the tokens of the likeliest clusters.

    With 2,048 clusters of 128 tokens and 32 clusters selected, a row takes 6,144 products in place of 262,144.

    Args:
        centroids: `[clusters, hidden]`.
        order: int64 `[vocab]`, token ids, cluster by cluster, all of one size.
        table: `[vocab, hidden]`, rows by token id.
        num_selected: clusters whose tokens are scored.
    """

    def __init__(self, centroids: Tensor, order: Tensor, table: Tensor, num_selected: int) -> None:
        self._centroids, self._num_selected = centroids, num_selected
        self._vocab = table.shape[0]
        self._members = order.view(centroids.shape[0], -1)  # [clusters, tokens of each]
        # Rows in the order of clusters, so that a cluster is read in one piece: row by row it took ten times as long.
        self._rows = table[order].view(centroids.shape[0], -1)  # [clusters, tokens of each * hidden]

    def candidates(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens that are scored and their logits, `[n, candidates]` each: int64 ids in no order, and `state`'s type.

        Args:
            state: `[n, hidden]`.
        """
        clusters = F.linear(state, self._centroids).topk(self._num_selected, dim=-1).indices
        ids = self._members[clusters].flatten(1)
        rows = self._rows.index_select(0, clusters.flatten()).view(*ids.shape, state.shape[-1])
        return ids, torch.bmm(rows, state.unsqueeze(-1)).squeeze(-1)

    def logits(self, state: Tensor) -> Tensor:
        """`[n, vocab]`; minus infinity for tokens that were not scored, which therefore have probability 0."""
        ids, scores = self.candidates(state)
        return state.new_full((state.shape[0], self._vocab), -torch.inf).scatter_(1, ids, scores)
