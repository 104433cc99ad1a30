"""Medusa-1's training objective: heads on a frozen target's hidden states (2401.10774, "Medusa-1: frozen backbone").

Responsible for its loss and its held-out acceptance. The hidden states were stored when the target wrote the text, so
training never runs the target. Knows no optimisers, run checkpoints or serving; called by
:mod:`paceline.training.trainer`.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.methods.checkpoint import DrafterConfig, save_drafter
from paceline.methods.medusa_heads.training import HeadStack, RankCounts, right_ranks
from paceline.training.acceptance import ChainAcceptance, chain_starts
from paceline.training.data import Batch
from paceline.training.objective import DrafterObjective, TargetReference


class Medusa1Objective(DrafterObjective):
    """Loss and acceptance of heads on a frozen target.

    Args:
        heads: the heads.
        target: what the exported checkpoint says of its target.
        decay: weight ratio of one head's loss to the head's before (0.8 in the paper).
    """

    method = "medusa1"

    def __init__(self, heads: HeadStack, target: TargetReference, decay: float = 0.8) -> None:
        super().__init__(heads.parameters, heads.dtype)
        self.heads = heads
        self.target = target
        self.decay = decay
        self._ranks = RankCounts(heads.shape.num_heads)

    def constants(self) -> dict[str, Tensor]:
        """The draft vocabulary, counted on the text."""
        return {"draft_ids": self.heads.draft_ids}

    def set_constants(self, constants: dict[str, Tensor]) -> None:
        """Fixes the draft vocabulary."""
        self.heads.set_draft_ids(constants["draft_ids"])

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """``sum_k decay^k CE(head k at r, token r + 2 + k)``; tokens of the prompt are no labels."""
        self._ranks = RankCounts(self.heads.shape.num_heads)  # earlier counts belong to older weights
        loss, metrics = self.heads.loss(batch.need_hidden().to(self.heads.dtype), batch, self.decay)
        if not loss.requires_grad:  # a batch without a single label
            loss = self.zero_loss()
        return loss, metrics

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> ChainAcceptance:
        """Greedy acceptance of chains that begin at every position of greedy answers.

        Heads do not read each other's tokens, so a chain has the likeliest token of each head, whatever was accepted.
        Also counts how often each rank of each head is right.
        """
        usable = chain_starts(batch.is_greedy_answer, self.heads.shape.num_heads)
        if not usable.any():
            return ChainAcceptance()
        hidden = batch.need_hidden().to(self.heads.dtype)
        right = right_ranks(self.heads, hidden, batch.top_tokens, usable)
        self._ranks.add(right)
        return ChainAcceptance.from_chains(right[:, :, 0])

    def export(self, folder: Path, facts: dict[str, Any]) -> None:
        """Writes ``config.json``, with the measured accuracy of each rank, and ``model.safetensors``."""
        shape = {
            **asdict(self.heads.shape),
            "max_positions": self.target.max_positions,
            "accuracies": self._ranks.accuracies,
        }
        config = DrafterConfig(self.method, self.target.fingerprint, self.target.name, shape, facts)
        save_drafter(folder, config, self.heads.tensors())
