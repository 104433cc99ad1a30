"""The training objective of EAGLE-1 and EAGLE-2: predict the target's next feature, and its head's next distribution.

Responsible for the loss (Li et al., 2401.15077, section 4.2: smooth L1 on features and 0.1 times the cross entropy) and
for held-out acceptance. Knows no optimisers, run checkpoints or serving; called by :mod:`paceline.training.trainer`.
EAGLE-2 (2406.16858) is trained as EAGLE-1 is. Serving runs the same weights in
:mod:`paceline.methods.eagle.feature_drafter`; a test compares the two.

Rows and steps are those of :mod:`paceline.training.unroll`; the loss uses the first step alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.methods.checkpoint import DrafterConfig, save_drafter
from paceline.methods.eagle.feature_layer import BLOCK, parameter_shapes
from paceline.methods.shared_head import SharedHead
from paceline.training.acceptance import EVAL_CHAIN, ChainAcceptance, chain_hits
from paceline.training.block import DifferentiableBlock
from paceline.training.data import Batch
from paceline.training.losses import head_distillation
from paceline.training.objective import DrafterObjective, TargetReference, checked_parameters
from paceline.training.sizes import DrafterSizes
from paceline.training.unroll import UnrolledBlock, unroll

_NUM_RANKS = 8
_NOISE_LENGTH = 512  # texts with more positions get less noise, in proportion to their length
_COUNT_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Eagle1Shape(DrafterSizes):
    """Sizes of an EAGLE-1 draft layer; it is as wide as its target."""

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Trained tensors by their names in the public checkpoint format."""
        return parameter_shapes(DrafterConfig("eagle1", "", shape={**asdict(self), "fc_bias": True}))


class Eagle1Objective(DrafterObjective):
    """Loss and acceptance of an EAGLE-1 layer.

    Args:
        shape: sizes.
        parameters: float32 parameters by checkpoint name; see :meth:`Eagle1Shape.parameter_shapes`.
        embedding: the target's token embedding ``[target_vocab, hidden]``, frozen.
        head: the target's head ``[target_vocab, hidden]``, frozen.
        target: what the exported checkpoint says of its target.
        method: ``eagle1`` or ``eagle2``, by which the exported checkpoint is served.
        feature_weight: of the smooth L1 loss on features.
        token_weight: of the cross entropy.
        token_rows: rows of a batch whose cross entropy is computed, chosen at random; 0 takes all.
        noise: largest entry of the uniform noise that training adds to the features that the layer reads.
        draft_ids: the target's id of every token that is proposed in evaluation and serving, ascending, int64
            ``[draft_vocab]``; None for all.
        dtype: compute type; parameters stay float32.
    """

    def __init__(
        self,
        shape: Eagle1Shape,
        parameters: dict[str, Tensor],
        embedding: Tensor,
        head: Tensor,
        target: TargetReference,
        method: str = "eagle1",
        feature_weight: float = 1.0,
        token_weight: float = 0.1,
        token_rows: int = 0,
        noise: float = 0.1,
        draft_ids: Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.method = method
        super().__init__(checked_parameters(method, shape.parameter_shapes(), parameters), dtype)
        self.shape, self.target = shape, target
        self.feature_weight, self.token_weight, self.token_rows = feature_weight, token_weight, token_rows
        self.noise = noise
        self._embedding = embedding.to(dtype)
        self._head = SharedHead(head, draft_ids, dtype)
        self._chosen = torch.zeros(EVAL_CHAIN, _NUM_RANKS, dtype=torch.int64)
        self._num_chains = 0

    def constants(self) -> dict[str, Tensor]:
        """The part of the vocabulary that is proposed; nothing where it is whole."""
        return self._head.constants()

    def set_constants(self, constants: dict[str, Tensor]) -> None:
        """Restores the part of the vocabulary."""
        self._head.set_constants(constants)

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """Weighted sum of both losses, over rows that propose an answer's token.

        Noise and the choice of rows come from torch's global generator, whose state a run's checkpoint keeps.
        """
        self._chosen.zero_()
        self._num_chains = 0
        hidden = self._features(batch)
        row, position = batch.is_answer[:, 2:].nonzero(as_tuple=True)
        if not row.numel():
            return self.zero_loss(), {}
        reach = self.noise * (_NOISE_LENGTH / batch.lengths).clamp_max(1.0)  # [rows]
        noise = (torch.rand(hidden.shape) * 2.0 - 1.0) * reach[:, None, None]
        weights = self.compute_weights()
        (state,) = self.unroll(weights, batch, hidden + noise.to(self.dtype), 1)
        predicted, wanted = state[row, position], hidden[row, position + 1]
        count = row.numel()
        # The published code divides sums by slightly more than the count.
        scale = count / (count + _COUNT_EPS)
        feature = F.smooth_l1_loss(predicted.float(), wanted.float()) * scale
        if self.token_rows and self.token_rows < count:
            some = torch.randperm(count)[: self.token_rows]
            predicted, wanted = predicted[some], wanted[some]
        token = head_distillation(predicted, wanted, self._head.weight) * scale
        total = self.feature_weight * feature + self.token_weight * token
        return total, {"feature": float(feature.detach()), "token": float(token.detach())}

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> ChainAcceptance:
        """Greedy acceptance of chains; see :func:`paceline.training.acceptance.chain_hits`.

        Also counts how often the target chose each of the likeliest tokens. :meth:`export` writes these counts for
        static trees.
        """
        count = min(_NUM_RANKS, self._head.draft_vocab)
        outputs = self.unroll(self.compute_weights(), batch, self._features(batch), EVAL_CHAIN)
        hits = chain_hits(batch, outputs, lambda states: self._head.best(states, count))
        self._chosen[:, : hits.shape[2]] += hits.sum(0)
        self._num_chains += len(hits)
        return ChainAcceptance.from_chains(hits[..., 0])

    def rank_accuracies(self) -> list[list[float]]:
        """By depth and rank, how often the target chose that token in evaluations since the last training step."""
        if not self._num_chains:
            return []
        fractions = self._chosen.double() / self._num_chains
        return [[round(value, 5) for value in row] for row in fractions.tolist()]

    def tensors(self) -> dict[str, Tensor]:
        """The servable checkpoint: bfloat16 by public name."""
        own = {k: p.detach().bfloat16() for k, p in self._parameters.items()}
        return own | self._head.constants()

    def export(self, folder: Path, facts: dict[str, Any]) -> None:
        """Writes ``config.json`` and ``model.safetensors``."""
        shape: dict[str, Any] = {**asdict(self.shape), **self._head.shape(), "fc_bias": True}
        shape["max_positions"] = self.target.max_positions
        if accuracies := self.rank_accuracies():
            shape["rank_accuracies"] = accuracies
        config = DrafterConfig(self.method, self.target.fingerprint, self.target.name, shape, facts)
        save_drafter(folder, config, self.tensors())

    def unroll(self, w: dict[str, Tensor], batch: Batch, features: Tensor, steps: int) -> Iterator[Tensor]:
        """Yields the predicted features ``[rows, length, hidden]`` of each step; ``features`` enter step 0."""

        def enter(ids: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            joined = torch.cat([F.embedding(ids, self._embedding), state], dim=-1)
            entered = F.linear(joined, w["fc.weight"], w["fc.bias"])
            return entered, entered

        layer = DifferentiableBlock(self.shape.block_shape(), w, BLOCK)
        block = UnrolledBlock(layer, self.shape.rope_theta, batch.tokens.shape[1], features.dtype)
        yield from unroll(block, batch.tokens, features, enter, steps)

    def _features(self, batch: Batch) -> Tensor:
        return batch.need_hidden().to(self.dtype)
