"""What a draft layer takes and gives: rows of several sequences in, outputs and logits out.

Responsible for the seam between drafters that go on from their own layer's output and the layer itself, in whatever
form it runs. Knows no method; called by `paceline.methods.autoregressive.drafter` and the methods' layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from paceline.cpu.growth import GrownTree
from paceline.target.kv_cache import Slot

MAX_BEST = 8
"""Most tokens of a row that :meth:`LayerOutput.best` can name."""


@dataclass(slots=True)
class Rows:
    """One sequence's rows in a forward pass.

    Attributes:
        slot: its cache; rows are written behind its settled and pending ones.
        tokens: target id of each row.
        states: `[n, hidden]`: features, or the layer's own outputs.
        positions: rotary position of each row.
        paths: of rows in a tree, the cache rows behind the settled ones that each sees, counted from there, its own
            last; None for a chain, whose rows see everything up to themselves.
        depths: of drafted rows, how many drafted tokens stand up to each, its own included; None for rows of true
            features.
    """

    slot: Slot
    tokens: Sequence[int]
    states: Tensor
    positions: Sequence[int]
    paths: list[list[int]] | None = None
    depths: Sequence[int] | None = None

    @property
    def num_rows(self) -> int:
        """Rows of this sequence."""
        return int(self.states.shape[0])

    @property
    def write_at(self) -> int:
        """Cache row of the first."""
        return self.slot.length + self.slot.num_pending


class LayerOutput(Protocol):
    """What a pass gives."""

    @property
    def states(self) -> Tensor:
        """What the layer goes on from, `[n, hidden]`, sequences in order."""

    @property
    def logits(self) -> Tensor:
        """Draft logits of the wanted rows, `[k, draft_vocab]` float32."""

    def best(self, count: int) -> tuple[list[list[float]], list[list[int]]]:
        """The likeliest tokens of each wanted row, best first: log-probabilities, and draft ids.

        Args:
            count: how many, at most `MAX_BEST`.
        """


class LayerSizes(Protocol):
    """What a drafter's features and its cache take their sizes from."""

    hidden: int
    num_kv_heads: int
    head_dim: int
    where: torch.device
    dtype: torch.dtype


class DraftLayer(LayerSizes, Protocol):
    """The draft layer, whatever it runs on."""

    def forward(self, rows: Sequence[Rows], wanted: Sequence[int]) -> LayerOutput:
        """Run rows of several sequences, writing their keys and values behind each slot's rows.

        Args:
            rows: one sequence's rows each.
            wanted: rows, counted over all sequences, whose logits are wanted.
        """


@dataclass(frozen=True, slots=True)
class TreeWanted:
    """A tree that is wanted of one sequence, by :class:`paceline.methods.autoregressive.tree_rule.DynamicRule`.

    Attributes:
        slot: its cache; what is run is written behind its settled and pending rows.
        start: committed length that the tree goes on from.
        depth: levels of nodes.
        width: nodes that are run at each level.
        branch: children of every node, at most `MAX_BEST`.
        root: the row behind which the tree begins, of an earlier pass; or its place among the wanted rows of this one.
    """

    slot: Slot
    start: int
    depth: int
    width: int
    branch: int
    root: StableRow | int


@runtime_checkable
class TreeGrower(Protocol):
    """A draft layer that grows whole trees by itself."""

    def grow(
        self,
        rows: Sequence[Rows],
        wanted: Sequence[int],
        trees: Sequence[TreeWanted],
        draft_ids: Tensor | None,
    ) -> tuple[LayerOutput | None, list[GrownTree]]:
        """Run rows as `DraftLayer.forward` does, if there are any, then grow trees behind theirs or earlier ones.

        Args:
            rows: one sequence's rows each.
            wanted: rows, counted over all sequences, whose logits are wanted.
            trees: at least one.
            draft_ids: `[draft_vocab]` int64 target id of each draft id; None where they are the same.

        Returns:
            What the rows gave, and the trees.
        """


@dataclass(frozen=True, slots=True)
class StableRow:
    """The last stable row of a sequence, in the pass that ran it.

    Attributes:
        output: of that pass.
        row: the row.
        place: its place among the rows with logits.
    """

    output: LayerOutput
    row: int
    place: int

    @property
    def state(self) -> Tensor:
        """`[1, hidden]`."""
        return self.output.states[self.row : self.row + 1]

    @property
    def logits(self) -> Tensor:
        """`[1, draft_vocab]`."""
        return self.output.logits[self.place : self.place + 1]

    def best(self, count: int) -> tuple[list[list[float]], list[list[int]]]:
        """As :meth:`LayerOutput.best`, of this row alone."""
        log_probs, ids = self.output.best(count)
        return [log_probs[self.place]], [ids[self.place]]


@dataclass(frozen=True, slots=True)
class TorchOutput:
    """A pass in torch operators; see :class:`LayerOutput`."""

    states: Tensor
    logits: Tensor

    def best(self, count: int) -> tuple[list[list[float]], list[list[int]]]:
        """See :class:`LayerOutput`."""
        log_probs, ids = self.logits.log_softmax(-1).topk(count, dim=-1)
        return log_probs.tolist(), ids.tolist()


def join_rows(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate along rows; a single part is passed through."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
