"""Sampling parameters of every row of a step.

Deliberately does not know: logits, which sequence a row belongs to.

Called by: every mode of verification; drafters, for their own rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from paceline.sampling.noise import seed_tensor
from paceline.sampling.params import SamplingParams, VerifyMode


@dataclass(frozen=True)
class RowParams:
    """Sampling parameters of every row of a step. Tensors are made on first use: greedy rows need none."""

    params: tuple[SamplingParams, ...]
    device: torch.device

    @classmethod
    def build(
        cls,
        params: Sequence[SamplingParams],
        rows_per_sequence: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> RowParams:
        """Repeat each sequence's parameters once for each of its rows in the step."""
        if len(params) != len(rows_per_sequence):
            raise ValueError(f"got {len(params)} parameter sets for {len(rows_per_sequence)} sequences")
        rows = (param for param, count in zip(params, rows_per_sequence, strict=True) for _ in range(count))
        return cls(tuple(rows), torch.device(device))

    def select(self, indices: Sequence[int]) -> RowParams:
        """The parameters of some rows."""
        return RowParams(tuple(self.params[index] for index in indices), self.device)

    def __len__(self) -> int:
        return len(self.params)

    @cached_property
    def all_greedy(self) -> bool:
        """Whether every row needs only its largest logit."""
        return all(param.is_greedy for param in self.params)

    @cached_property
    def modes(self) -> tuple[VerifyMode, ...]:
        """The mode of each row."""
        return tuple(param.resolved_mode for param in self.params)

    @cached_property
    def seeds(self) -> Tensor:
        """[rows] int64: the seeds' bits."""
        return seed_tensor([param.seed for param in self.params], self.device)
