"""A linear map as checkpoints store it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Projection:
    """A weight `[out_features, in_features]` and its bias `[out_features]`, if it has one."""

    weight: Tensor
    bias: Tensor | None = None

    @classmethod
    def join(cls, parts: list[Projection]) -> Projection:
        """One projection that gives the outputs of several, side by side; all or none have a bias."""
        biases = [part.bias for part in parts if part.bias is not None]
        return cls(torch.cat([part.weight for part in parts]), torch.cat(biases) if biases else None)
