"""How a bigram is trained: its options, and cross entropy against the text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.methods.checkpoint import DrafterConfig, save_drafter
from paceline.training.acceptance import EVAL_CHAIN, ChainAcceptance, chain_hits
from paceline.training.data import Batch
from paceline.training.inputs import TrainingInputs
from paceline.training.objective import DrafterObjective, TargetReference, checked_parameters
from paceline.training.options import option
from paceline.training.recipe import Recipe
from paceline.training.sizes import ModelSizes
from tests.methods.bigram.drafter import LAST, NEXT, parameter_shapes


@dataclass(frozen=True, slots=True)
class BigramOptions:
    """Options of a bigram.

    Attributes:
        rank: width of both tables.
    """

    rank: int = option(16, minimum=1)


class BigramObjective(DrafterObjective):
    """Loss and acceptance of two tables."""

    method = "bigram"

    def __init__(self, config: DrafterConfig, seed: int, target: TargetReference, dtype: torch.dtype) -> None:
        shapes = parameter_shapes(config)
        random = torch.Generator().manual_seed(seed)
        start = {name: torch.randn(shape, generator=random) * 0.1 for name, shape in shapes.items()}
        super().__init__(checked_parameters(self.method, shapes, start), dtype)
        self._config, self._target = config, target

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """Cross entropy of each answer token, given the token before it."""
        labelled = batch.is_answer[:, 1:]
        if not labelled.any():
            return self.zero_loss(), {}
        weights = self.compute_weights()
        logits = weights[LAST][batch.tokens[:, :-1][labelled]] @ weights[NEXT].T
        loss = F.cross_entropy(logits.float(), batch.tokens[:, 1:][labelled])
        return loss, {"loss": float(loss.detach())}

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> ChainAcceptance:
        """Greedy acceptance of chains on held-out answers."""
        weights = self.compute_weights()

        def outputs() -> Iterator[Tensor]:
            for depth in range(EVAL_CHAIN):  # row r reads token r + 1 + depth
                yield weights[LAST][batch.tokens.roll(-1 - depth, dims=1)]

        def best(rows: Tensor) -> Tensor:
            return (rows @ weights[NEXT].T).argmax(dim=-1, keepdim=True)

        return ChainAcceptance.from_chains(chain_hits(batch, outputs(), best)[:, :, 0])

    def export(self, folder: Path, facts: dict[str, Any]) -> None:
        """Writes a servable checkpoint."""
        target, shape = self._target, self._config.shape
        config = DrafterConfig(self.method, target.fingerprint, target.name, shape, facts)
        save_drafter(folder, config, {name: p.detach().clone() for name, p in self._parameters.items()})


def _build(options: BigramOptions, inputs: TrainingInputs) -> BigramObjective:
    target = ModelSizes.read(inputs.model_dir)
    shape = {"rank": options.rank, "target_vocab": target.vocab, "max_positions": target.max_positions}
    config = DrafterConfig("bigram", inputs.fingerprint, shape=shape)
    return BigramObjective(config, inputs.seed, inputs.reference(target.max_positions), inputs.dtype)


RECIPE = Recipe(BigramOptions, _build)
