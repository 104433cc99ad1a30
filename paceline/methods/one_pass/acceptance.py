"""How far chains are accepted that one pass drafts, on held-out text.

What a mask row proposes does not depend on tokens after its anchor. So one pass over all depths of all anchors measures
what chains drafted from each position would do. Called by the objectives of P-EAGLE and PARD.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.methods.one_pass.rows import FlatRows, all_rows
from paceline.training.acceptance import EVAL_CHAIN, ChainAcceptance
from paceline.training.data import Batch

_TEXTS = 2  # at once: all depths of all anchors are many rows


def one_pass_acceptance(
    batch: Batch,
    num_depths: int,
    ahead: int,
    forward: Callable[[Batch, FlatRows], Tensor],
    best: Callable[[Tensor], Tensor],
) -> ChainAcceptance:
    """Greedy acceptance of chains, for every position of greedy answers.

    Args:
        batch: held-out texts.
        num_depths: depths that the drafter has.
        ahead: row ``r`` proposes token ``r + ahead``.
        forward: final states ``[texts, n, hidden]`` of rows of some texts.
        best: the target's id of the likeliest token, ``[n, hidden]`` to int64 ``[n]``.
    """
    chain = min(EVAL_CHAIN, num_depths)
    counts = ChainAcceptance()
    for first in range(0, batch.tokens.shape[0], _TEXTS):
        part = batch.part(slice(first, first + _TEXTS))
        rows = [all_rows(length, chain) for length in part.lengths.tolist()]
        own = [torch.ones(one.shape[1], dtype=torch.bool) for one in rows]
        states = forward(part, FlatRows.pad(rows, own))
        for i, length in enumerate(part.lengths.tolist()):
            starts = length - (ahead - 1) - chain  # anchors whose whole chain lies within the text
            if starts <= 0:
                continue
            anchors, depths = rows[i]
            proposed = torch.full((length, chain), -1, dtype=torch.int64)
            proposed[anchors, depths] = best(states[i, : anchors.numel()])
            chosen = part.top_tokens[i].unfold(0, chain, 1)[ahead - 1 : ahead - 1 + starts]
            usable = part.is_greedy_answer[i].unfold(0, chain, 1).all(-1)[ahead : ahead + starts]
            counts = counts + ChainAcceptance.from_chains((proposed[:starts] == chosen)[usable])
    return counts
