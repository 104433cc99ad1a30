"""What a method gives to the trainer: an objective, which names its target. Knows no method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.contract.errors import TrainingDataError
from paceline.training.acceptance import ChainAcceptance
from paceline.training.data import Batch
from paceline.training.loop import Trainee


@dataclass(frozen=True, slots=True)
class TargetReference:
    """The target that a drafter is made for.

    Attributes:
        fingerprint: of the target's weights and configuration.
        name: of the target's directory.
        tap_layers: layers whose input (the residual stream) the drafter reads.
        max_positions: longest text.
    """

    fingerprint: str
    name: str
    tap_layers: tuple[int, ...]
    max_positions: int


class Objective(Trainee, Protocol):
    """A drafter under training.

    Its parameters are float32, by checkpoint name. Its constants depend on the text at the time training began; a
    resumed run takes them from its checkpoint, and so continues as the same run.
    """

    def evaluate(self, batch: Batch) -> ChainAcceptance:
        """Greedy acceptance of drafted chains on held-out text."""

    def export(self, folder: Path, facts: dict[str, Any]) -> None:
        """Writes a servable checkpoint: ``config.json`` (with ``facts`` under ``training``) and safetensors."""


class DrafterObjective:
    """What objectives have in common: trained parameters and a compute type; no constants and no curriculum.

    Args:
        parameters: float32, by checkpoint name.
        dtype: compute type.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], dtype: torch.dtype) -> None:
        self._parameters, self.dtype = parameters, dtype

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Everything the optimisers move, by checkpoint name."""
        return self._parameters

    def constants(self) -> dict[str, Tensor]:
        """What was fixed when training began."""
        return {}

    def set_constants(self, constants: dict[str, Tensor]) -> None:
        """Restores what :meth:`constants` gave."""

    def set_progress(self, fraction: float) -> None:
        """Called before each step with the run's progress in ``[0, 1]``; by default there is no curriculum."""

    def compute_weights(self) -> dict[str, Tensor]:
        """Parameters in the compute type."""
        return {name: p.to(self.dtype) for name, p in self._parameters.items()}

    def zero_loss(self) -> Tensor:
        """The loss of a batch without a single row to learn from: 0, with gradients of 0."""
        return sum((p.sum() * 0.0 for p in self._parameters.values()), torch.zeros(()))


def checked_parameters(
    method: str, expected: Mapping[str, tuple[int, ...]], parameters: Mapping[str, Tensor]
) -> dict[str, nn.Parameter]:
    """Float32 copies of parameters, by checkpoint name.

    Raises:
        TrainingDataError: a tensor is missing, surplus or of another shape than expected.
    """
    wrong = {k for k in expected if k not in parameters or tuple(parameters[k].shape) != expected[k]}
    wrong |= parameters.keys() - expected.keys()
    if wrong:
        raise TrainingDataError(f"{method} parameters do not fit the shape: {sorted(wrong)}")
    return {k: nn.Parameter(v.float().clone()) for k, v in parameters.items()}
