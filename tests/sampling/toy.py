"""A language model small enough to enumerate: next-token weights drawn from a seed for every prefix."""

from __future__ import annotations

import random
from fractions import Fraction

import torch

from paceline.sampling.distribution import DraftDistribution

Prefix = tuple[int, ...]


class ToyModel:
    """Next-token probabilities that depend on the whole prefix; multiples of 1/64, so floats hold them exactly.

    Args:
        seed: which model.
        vocab: vocabulary size.
        zero_fraction: how often a token gets probability zero.
    """

    def __init__(self, seed: int, vocab: int, zero_fraction: float = 0.0) -> None:
        self.seed = seed
        self.vocab = vocab
        self.zero_fraction = zero_fraction
        self._known: dict[Prefix, list[Fraction]] = {}

    def fractions(self, prefix: Prefix) -> list[Fraction]:
        """Next-token probabilities after a prefix."""
        if prefix not in self._known:
            self._known[prefix] = self._draw(prefix)
        return self._known[prefix]

    def _draw(self, prefix: Prefix) -> list[Fraction]:
        rng = random.Random(f"{self.seed}:{prefix}")
        weights = [0 if rng.random() < self.zero_fraction else 1 for _ in range(self.vocab)]
        weights[rng.randrange(self.vocab)] = 1
        for _ in range(64 - sum(weights)):
            weights[rng.choice([token for token, weight in enumerate(weights) if weight])] += 1
        return [Fraction(weight, 64) for weight in weights]

    def distribution(self, prefix: Prefix) -> DraftDistribution:
        """The same in whole numbers, as a drafter sends it."""
        weights = [int(value * 64) for value in self.fractions(prefix)]
        support = [token for token, weight in enumerate(weights) if weight]
        return DraftDistribution.of_weights(
            torch.tensor(support), torch.tensor([weights[token] for token in support])
        )

    def probs(self, prefix: Prefix) -> torch.Tensor:
        """[vocab] float64"""
        return torch.tensor([float(value) for value in self.fractions(prefix)], dtype=torch.float64)

    def logits(self, prefix: Prefix) -> torch.Tensor:
        """[vocab] float32"""
        return self.probs(prefix).log().to(torch.float32)
