"""What a method hands to the trainer. The trainer knows this seam and no method; called by both sides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from paceline.contract.errors import TrainingDataError
from paceline.training.acceptance import AcceptanceCounts
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

    Its parameters are float32, by checkpoint name; its constants depend on the data of the day on which training
    began, so that a resumed run is the same run.
    """

    def evaluate(self, batch: Batch) -> AcceptanceCounts:
        """Greedy acceptance of drafted chains on held-out text."""

    def export(self, folder: Path, facts: dict[str, Any]) -> None:
        """Writes a servable checkpoint: ``config.json`` (with ``facts`` under ``training``) and safetensors."""


def checked_parameters(
    method: str, expected: Mapping[str, tuple[int, ...]], parameters: Mapping[str, Tensor]
) -> dict[str, nn.Parameter]:
    """Float32 parameters of their own, by checkpoint name.

    Raises:
        TrainingDataError: a tensor is missing, surplus or of another shape than expected.
    """
    wrong = {k for k in expected if k not in parameters or tuple(parameters[k].shape) != expected[k]}
    if wrong or set(parameters) - set(expected):
        raise TrainingDataError(f"{method} parameters do not fit the shape: {sorted(wrong)}")
    return {k: nn.Parameter(v.float().clone()) for k, v in parameters.items()}
