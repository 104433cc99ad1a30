"""The paths that an independent drafter drafts past verification outcomes of its last chain."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.methods.choice import rank_children
from paceline.methods.tree import ROOT, GrowingTree
from paceline.sampling.params import SamplingParams

BRANCH = 4
"""Children that every row of a tree proposes."""


class OutcomeTree:
    """A chain, and paths past the outcomes at which the target may leave it.

    Attributes:
        nodes: the proposed nodes.
        tokens: tokens of the rows to run: the chain's, then those of the paths.
        parents: parent of each row, -1 for the root.
    """

    def __init__(self, chain: Sequence[int]) -> None:
        self.nodes = GrowingTree()
        self.tokens = list(chain)
        self.parents = list(range(-1, len(chain) - 1))
        self._rows: list[int] = []  # node of each row that was run
        self._chain = len(chain)
        self._fresh: list[int] = []

    def run(self, nodes: Sequence[int]) -> None:
        """Add rows for proposed nodes."""
        tokens, from_rows, _, _ = self.nodes.run(nodes)
        self.tokens += tokens
        self.parents += from_rows
        self._fresh = list(nodes)

    def propose(
        self, logits: torch.Tensor, draft_ids: torch.Tensor | None, length: int, sampling: SamplingParams
    ) -> None:
        """Take in `[1 + rows, draft_vocab]` float32 logits, the root's first, of a text of `length` committed tokens.

        `draft_ids` are the target's ids of their columns, as in `choose_chain_tokens`.
        """
        if self._rows:
            rows = logits[1 + len(self._rows) :]
            depths = self.nodes.depths(self._fresh)
        else:
            rows, depths = logits, list(range(self._chain + 1))
        if len(rows) == 0:
            return
        positions = [length + depth for depth in depths]
        log_probs, ids = rank_children(rows, draft_ids, positions, [sampling] * len(positions), BRANCH)
        if draft_ids is not None:
            ids = [draft_ids[row].tolist() for row in ids]
        if self._rows:
            self.nodes.propose(self._fresh, log_probs, ids)
            self._rows += self._fresh
            self._fresh = []
            return
        parent = ROOT
        for place, (own_log_probs, own_ids) in enumerate(zip(log_probs, ids, strict=True)):
            if (
                place < self._chain and self.tokens[place] not in own_ids
            ):  # chosen otherwise: it is kept, as the last
                own_log_probs[-1], own_ids[-1] = own_log_probs[-1], self.tokens[place]
            self.nodes.propose([parent], [own_log_probs], [own_ids])
            if place < self._chain:
                parent = self.nodes.send_child(parent, self.tokens[place])
                self.nodes.run([parent])
                self._rows.append(parent)
