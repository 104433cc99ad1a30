"""Medusa's heads in training: their differentiable forward pass, their loss, and how often each rank is right.

Shared by the objectives of Medusa-1 (a frozen target) and Medusa-2 (heads and target together). Knows nothing of the
source of hidden states, of optimisers or of files. Serving runs the same tensors in
`paceline.methods.medusa_heads.heads`; a test compares the two.

Row ``r`` is the target's final hidden state of position ``r``; head ``k`` predicts token ``r + 2 + k`` from it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.contract.errors import TrainingDataError
from paceline.methods.medusa_heads.heads import MAX_RANKS, MedusaShape, OutputHead
from paceline.training import shards
from paceline.training.data import Batch, Corpus
from paceline.training.draft_vocabulary import draft_ids_of
from paceline.training.losses import linear_cross_entropy
from paceline.training.objective import checked_parameters
from paceline.training.start import RIDGE, solve_ridge

_CHUNK_ROWS = 256


class HeadStack:
    """All heads with their parameters.

    Args:
        shape: sizes; a head shared by all is frozen.
        parameters: float32, by checkpoint name.
        target_head: the target's LM head ``[target_vocab, hidden]``; frozen output heads are rows of it.
        draft_ids: target id of every draft id, int64 ``[draft_vocab]``.
        dtype: compute type.
    """

    def __init__(
        self,
        shape: MedusaShape,
        parameters: dict[str, Tensor],
        target_head: Tensor,
        draft_ids: Tensor,
        dtype: torch.dtype,
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.parameters = checked_parameters("medusa", shape.parameter_shapes(), parameters)
        self._target_head = target_head
        self.set_draft_ids(draft_ids)

    def set_draft_ids(self, draft_ids: Tensor) -> None:
        """Fixes the draft vocabulary."""
        self.draft_ids = draft_ids
        self._frozen = (
            self._target_head[draft_ids].to(self.dtype) if self.shape.output is OutputHead.TARGET else None
        )
        self._draft_of = draft_ids_of(draft_ids, self.shape.target_vocab)

    def states(self, hidden: Tensor, head: int) -> Tensor:
        """What the output head of one head reads: ``[n, hidden] -> [n, hidden]``."""
        z = hidden
        for j in range(self.shape.num_layers):
            prefix = f"blocks.{head}.layers.{j}."
            bias = self.parameters[prefix + "bias"].to(self.dtype) if self.shape.has_bias else None
            z = z + F.silu(F.linear(z, self.parameters[prefix + "weight"].to(self.dtype), bias))
        return z

    def output_weight(self, head: int) -> Tensor:
        """Output head of one head, ``[draft_vocab, hidden]`` in the compute type."""
        if self._frozen is not None:
            return self._frozen
        name = "lm_head.weight" if self.shape.output is OutputHead.SHARED else f"lm_heads.{head}.weight"
        return self.parameters[name].to(self.dtype)

    def loss(self, hidden: Tensor, batch: Batch, decay: float) -> tuple[Tensor, dict[str, float]]:
        """``sum_k decay^k CE(head k)`` over labels that belong to an answer and can be drafted.

        Args:
            hidden: ``[rows, length, hidden]`` in the compute type.
            batch: the text.
            decay: weight of one head's loss over that of the head before.

        Returns:
            A scalar, and the mean cross entropy of each head in nats.
        """
        labels = self._draft_of[batch.tokens].masked_fill(~batch.is_answer, -1)  # [rows, length]
        total = torch.zeros(())
        metrics: dict[str, float] = {}
        for k in range(self.shape.num_heads):
            ahead = labels[:, 2 + k :]
            wanted = ahead >= 0
            if not wanted.any():
                continue
            rows = hidden[:, : ahead.shape[1]][wanted]  # [n, hidden]
            value = linear_cross_entropy(self.states(rows, k), self.output_weight(k), ahead[wanted])
            total = total + decay**k * value
            metrics[f"head_{k}"] = float(value.detach())
        return total, metrics

    @torch.no_grad()
    def best(self, hidden: Tensor, head: int) -> Tensor:
        """The likeliest target ids of one head, best first: ``[n, hidden] -> int64 [n, MAX_RANKS]``."""
        weight, count = self.output_weight(head), min(MAX_RANKS, self.shape.draft_vocab)
        states = self.states(hidden, head)
        parts = [
            (states[start : start + _CHUNK_ROWS] @ weight.T).topk(count, dim=-1).indices
            for start in range(0, states.shape[0], _CHUNK_ROWS)
        ]
        found = torch.cat(parts) if parts else torch.empty(0, count, dtype=torch.int64)
        return self.draft_ids[found]

    def tensors(self) -> dict[str, Tensor]:
        """The servable tensors: bfloat16 by checkpoint name, and the token map of a reduced vocabulary."""
        out = {k: p.detach().bfloat16() for k, p in self.parameters.items()}
        if self.shape.is_reduced:
            out["token_map"] = self.draft_ids.clone()
        return out


class RankCounts:
    """How often the token of each rank of each head was right; the static tree is built from these counts."""

    def __init__(self, num_heads: int) -> None:
        self._right = torch.zeros(num_heads, MAX_RANKS, dtype=torch.int64)
        self._total = 0

    def add(self, right: Tensor) -> None:
        """Counts bool ``[rows, num_heads, ranks]``."""
        self._right[:, : right.shape[2]] += right.sum(0)
        self._total += int(right.shape[0])

    @property
    def accuracies(self) -> list[list[float]]:
        """P(the token of a rank is right), by head and rank."""
        return [[round(x, 4) for x in row] for row in (self._right / max(self._total, 1)).tolist()]


def right_ranks(heads: HeadStack, hidden: Tensor, chosen: Tensor, usable: Tensor) -> Tensor:
    """Whether each rank of each head is the token that the target chose: bool ``[starts, num_heads, ranks]``.

    Args:
        heads: the heads.
        hidden: ``[rows, length, hidden]`` in the compute type.
        chosen: int64 ``[rows, length]``, what the target chooses after each position.
        usable: bool ``[rows, length]``, from :func:`paceline.training.acceptance.chain_starts`.
    """
    starts = hidden[usable]
    row, position = usable.nonzero(as_tuple=True)
    found = [
        heads.best(starts, k) == chosen[row, position + 1 + k].unsqueeze(1)
        for k in range(heads.shape.num_heads)
    ]
    return torch.stack(found, dim=1)


def starting_parameters(shape: MedusaShape, target_head: Tensor, seed: int) -> dict[str, Tensor]:
    """The paper's start: blocks that are nearly the identity, and output heads copied from the target's head.

    As in the authors' code, block weights are zero and biases have the usual uniform start. So every head first
    predicts what the LM head predicts: the token *before* its own.

    Args:
        shape: sizes.
        target_head: rows of the target's LM head, ``[draft_vocab, hidden]``.
        seed: of the biases.
    """
    random = torch.Generator().manual_seed(seed)
    parameters: dict[str, Tensor] = {}
    for name, size in shape.parameter_shapes().items():
        if name.startswith("lm_head"):
            parameters[name] = target_head.float()
        elif name.endswith("bias"):
            parameters[name] = (torch.rand(size, generator=random) * 2 - 1) * shape.hidden**-0.5
        else:
            parameters[name] = torch.zeros(size)
    return parameters


def fit_look_ahead(corpus: Corpus, num_heads: int, max_tokens: int) -> list[Tensor]:
    """Ridge regressions from a hidden state to the states that the LM head reads 1, 2, ... positions later.

    Args:
        corpus: text with hidden states.
        num_heads: how many.
        max_tokens: answer tokens to read.

    Returns:
        For head ``k`` a float32 matrix ``[hidden, hidden]`` from the state of ``r`` to about that of ``r + 1 + k``.
    """
    seen = 0
    grams: list[Tensor] = []
    products: list[Tensor] = []
    for batch in corpus.epoch(0, shards.shard_indices(corpus.folder)[:4]):
        hidden = batch.need_hidden().float()
        if not grams:
            width = hidden.shape[-1]
            grams = [torch.zeros(width, width) for _ in range(num_heads)]
            products = [torch.zeros(width, width) for _ in range(num_heads)]
        # The last position of a text was never run; its state is zero.
        is_run = torch.arange(hidden.shape[1])[None] < (batch.lengths - 1)[:, None]
        for k in range(num_heads):
            keep = (batch.is_answer & is_run)[:, 1 + k :]
            here, there = hidden[:, : keep.shape[1]][keep], hidden[:, 1 + k :][keep]
            grams[k] += here.T @ here
            products[k] += here.T @ there
            seen += int(keep.sum()) if k == 0 else 0
        if seen >= max_tokens:
            break
    if seen == 0:
        raise TrainingDataError(f"{corpus.folder}: no answers to fit the start on")
    penalties = [RIDGE * float(gram.diagonal().mean()) for gram in grams]
    return [
        solve_ridge(gram, product, penalty).contiguous()
        for gram, product, penalty in zip(grams, products, penalties, strict=True)
    ]
