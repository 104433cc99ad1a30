"""How far drafted chains are accepted on held-out text.

Given that all tokens before were accepted, a drafter's own tokens are the text's tokens. So one run of the drafter over
a greedily answered text measures what chains drafted from each position would do. Pure; called by the objectives and
the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.training.data import Batch

EVAL_CHAIN = 5
"""Tokens of a chain that is evaluated."""


@dataclass(frozen=True, slots=True)
class ChainAcceptance:
    """How many chains of one length reached and passed each depth.

    Attributes:
        reached: per depth, chains whose earlier tokens were all accepted.
        accepted: per depth, chains accepted up to and including it.
    """

    reached: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()

    @classmethod
    def from_chains(cls, right: Tensor) -> ChainAcceptance:
        """Counts from ``right`` bool ``[chains, depth]``: whether the target would choose this token here."""
        alive = right.int().cumprod(dim=1)
        accepted = tuple(int(x) for x in alive.sum(0))
        return cls(reached=(right.shape[0], *accepted[:-1]), accepted=accepted)

    def __add__(self, other: ChainAcceptance) -> ChainAcceptance:
        if not self.reached:
            return other
        if not other.reached:
            return self
        return ChainAcceptance(
            tuple(a + b for a, b in zip(self.reached, other.reached, strict=True)),
            tuple(a + b for a, b in zip(self.accepted, other.accepted, strict=True)),
        )

    @property
    def per_depth(self) -> list[float]:
        """P(accepted at depth d | everything before was accepted)."""
        return [a / r if r else 0.0 for a, r in zip(self.accepted, self.reached, strict=True)]

    @property
    def mean_accepted(self) -> float:
        """Drafted tokens accepted per chain; a round commits one token more."""
        return sum(self.accepted) / self.reached[0] if self.reached and self.reached[0] else 0.0


def chain_starts(wanted: Tensor, chain: int) -> Tensor:
    """Rows that begin a chain of wanted tokens: bool ``[rows, length]``.

    Args:
        wanted: bool ``[rows, length]``, tokens that count.
        chain: tokens of a chain. Row ``r`` proposes tokens ``r + 2 .. r + 1 + chain``.
    """
    rows, length = wanted.shape
    starts = torch.zeros(rows, length, dtype=torch.bool)
    span = length - 1 - chain
    if span > 0:
        starts[:, :span] = wanted.unfold(1, chain, 1).all(-1)[:, 2 : 2 + span]
    return starts


def chain_hits(
    batch: Batch, outputs: Iterable[Tensor], best: Callable[[Tensor], Tensor], chain: int = EVAL_CHAIN
) -> Tensor:
    """Whether the target would choose what a drafter proposes: bool ``[chains, chain, ranks]``.

    Chains begin at every row whose proposals are all tokens of a greedy answer.

    Args:
        batch: held-out texts.
        outputs: what the head reads at each depth, ``[rows, length, hidden]``. Row ``r`` at depth ``j`` proposes token
            ``r + 2 + j``, which the target chose at position ``r + 1 + j``. Not read where there are no chains.
        best: from ``[n, hidden]`` to the target's ids of the likeliest tokens, best first, int64 ``[n, ranks]``.
        chain: depths.
    """
    row, position = chain_starts(batch.is_greedy_answer, chain).nonzero(as_tuple=True)
    if not row.numel():
        return torch.zeros(0, chain, 1, dtype=torch.bool)
    hits = [
        best(out[row, position]) == batch.top_tokens[row, position + 1 + j, None]
        for j, out in enumerate(outputs)
    ]
    return torch.stack(hits, dim=1)
