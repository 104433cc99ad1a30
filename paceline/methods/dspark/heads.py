"""DSpark's small heads over a block's rows (2607.05147, section 3): a Markov head and a confidence head.

The *Markov* head adds to a row's logits a bias of low rank that depends on the token before: `W2 m`, where `m` is the
token's row of `W1`: unchanged, gated by the row's output, or passed through a small recurrent cell. The *confidence*
head reads the row's output and that row of `W1`. It gives the log-odds that the target accepts the row's token, given
that it accepted the tokens before.

Pure functions on tensors by their public names, which training and serving share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.methods.checkpoint import CheckpointError, DrafterConfig

MARKOV_IN, MARKOV_OUT = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"


class MarkovHead(Enum):
    """What the bias is a product of."""

    VANILLA = "vanilla"
    GATED = "gated"
    RNN = "rnn"


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """Which heads there are.

    Attributes:
        markov: the Markov head's kind.
        rank: rank of the Markov head's bias.
        has_confidence: whether there is a confidence head.
        confidence_reads_token: whether the confidence head reads the token before as well.
        temperatures: divisors of its log-odds for the first rows of a block; the last holds for all further rows.
    """

    markov: MarkovHead = MarkovHead.VANILLA
    rank: int = 256
    has_confidence: bool = True
    confidence_reads_token: bool = True
    temperatures: tuple[float, ...] = ()

    @classmethod
    def read(cls, config: DrafterConfig) -> HeadPlan:
        """From `shape.markov_head`, `markov_rank`, `confidence_head`, `confidence_reads_token` and, where it is there,
        `confidence_temperatures`.

        Raises:
            CheckpointError: an unknown kind of head, or malformed temperatures.
        """
        kind = config.shape.get("markov_head")
        if kind not in [known.value for known in MarkovHead]:
            raise CheckpointError(f"shape.markov_head {kind!r} is none of vanilla, gated, rnn")
        return cls(
            MarkovHead(kind),
            config.size("markov_rank"),
            config.flag("confidence_head"),
            config.flag("confidence_reads_token"),
            _temperatures(config.shape.get("confidence_temperatures", [])),
        )

    def temperature(self, depth: int) -> float:
        """The temperature of the row that proposes the token `depth` places after the first."""
        return self.temperatures[min(depth, len(self.temperatures) - 1)] if self.temperatures else 1.0

    def parameter_shapes(self, hidden: int, vocab: int, draft_vocab: int) -> dict[str, tuple[int, ...]]:
        """Shapes by public name; the token before has a target id, the bias is over draft ids."""
        r = self.rank
        shapes: dict[str, tuple[int, ...]] = {MARKOV_IN: (vocab, r), MARKOV_OUT: (draft_vocab, r)}
        if self.markov is MarkovHead.GATED:
            shapes |= {"markov_head.gate_proj.weight": (r, hidden + r), "markov_head.gate_proj.bias": (r,)}
        if self.markov is MarkovHead.RNN:
            shapes["markov_head.joint_proj.weight"] = (3 * r, 2 * r + hidden)
            shapes["markov_head.joint_proj.bias"] = (3 * r,)
        if self.has_confidence:
            width = hidden + r * self.confidence_reads_token
            shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
        return shapes

    def mix(
        self, w: Mapping[str, Tensor], states: Tensor, embedded: Tensor, memory: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What the bias is a product of, and the cell's next memory.

        Args:
            w: tensors by public name.
            states: `[n, hidden]`, the rows' outputs.
            embedded: `[n, rank]`, `W1` of the tokens before.
            memory: `[n, rank]`, 0 for the first row of a block; only the recurrent head changes it.

        Returns:
            `[n, rank]`, to be multiplied by `W2`, and `[n, rank]`.
        """
        if self.markov is MarkovHead.GATED:
            weight, bias = (w[f"markov_head.gate_proj.{x}"] for x in ("weight", "bias"))
            gate = torch.sigmoid(F.linear(torch.cat([states, embedded], dim=-1), weight, bias))
            return gate * embedded, memory
        if self.markov is MarkovHead.RNN:
            weight, bias = (w[f"markov_head.joint_proj.{x}"] for x in ("weight", "bias"))
            joined = F.linear(torch.cat([memory, embedded, states], dim=-1), weight, bias)
            gate, candidate, output = joined.chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            memory = gate * memory + (1.0 - gate) * torch.tanh(candidate)
            return torch.tanh(output), memory
        return embedded, memory

    def confidence(self, w: Mapping[str, Tensor], states: Tensor, embedded: Tensor) -> Tensor:
        """Log-odds that a row's token is accepted, `[n]`; arguments as of :meth:`mix`."""
        read = torch.cat([states, embedded], dim=-1) if self.confidence_reads_token else states
        return F.linear(read, w["confidence_head.proj.weight"], w["confidence_head.proj.bias"]).squeeze(-1)


def _temperatures(value: object) -> tuple[float, ...]:
    if not isinstance(value, list) or not all(isinstance(t, int | float) and 0 < t < math.inf for t in value):
        raise CheckpointError(
            f"shape.confidence_temperatures must be a list of numbers above 0, not {value!r}"
        )
    return tuple(map(float, value))
