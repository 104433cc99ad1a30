"""The protocol of an executor: the part of the engine that runs a model over a planned step.

`paceline.target.executors.lean` and `paceline.target.executors.generic` implement it in torch,
`paceline.cpu.executor` on the CPU kernels. `paceline.target.executors.backend` chooses one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from paceline.model.architecture import Architecture
from paceline.target.attention.attend import StepPlan


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of the model that others derive their own sizes from.

    Attributes:
        num_kv_heads: key heads, of the layer that has most.
        head_dim: their width, in the layer where they are widest.
        layer_heads: key heads and their width, layer by layer; empty where all layers are alike.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    layer_heads: tuple[tuple[int, int], ...] = ()

    def heads(self, layer: int) -> tuple[int, int]:
        """Key heads of a layer, and their width."""
        return self.layer_heads[layer] if self.layer_heads else (self.num_kv_heads, self.head_dim)

    @classmethod
    def of(cls, arch: Architecture) -> ModelShape:
        """The numbers of an architecture."""
        return cls(
            arch.model_type,
            arch.num_layers,
            arch.hidden_size,
            arch.num_heads,
            arch.num_kv_heads,
            arch.head_dim,
            arch.vocab_size,
            arch.max_positions,
        )


@dataclass(frozen=True, slots=True)
class ExecutorOutput:
    """Result of one forward pass.

    Attributes:
        logits: `[k, vocab]` float32, rows in the order of `plan.logit_rows`.
        streams: captured residual streams, layer -> `[num_rows, hidden]`.
        final: output of the final norm `[num_rows, hidden]` if the plan captures `FINAL_NORM`, else None.
        maxima: `[k, ceil(vocab / 32)]` float32, the largest of every 32 logits, NaN if one of them is; None where they
            are not known. Verification then reads the logits one time less.
    """

    logits: Tensor
    streams: dict[int, Tensor]
    final: Tensor | None
    maxima: Tensor | None = None


# In `StepPlan.capture`: the output of the final norm. Layers are 0..num_layers.
FINAL_NORM = -1


def nothing() -> None:
    """The default where no caller waits for a pass to begin."""


class Executor(Protocol):
    """Runs one model."""

    shape: ModelShape
    num_bytes: int  # of the weights in memory
    joins_neighbours: bool  # whether attending several sequences in one call is faster

    def forward(self, plan: StepPlan, on_begin: Callable[[], None] = nothing) -> ExecutorOutput:
        """Run the planned rows, appending their keys and values to their slots.

        Args:
            plan: the rows.
            on_begin: called before the pass, as late as the executor can.
        """

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings of `tokens` `[n]` as they enter layer 0: `[n, hidden]`."""

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of states after the final norm: `[n, hidden] -> [n, vocab]` float32."""
