"""What a draft layer takes and gives: rows of several sequences in, outputs and logits out.

Drafters see their layer through these types, whatever runs it. This file knows no method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from paceline.target.kv.slot import Slot

MAX_BEST = 8
"""Most tokens of a row that :meth:`LayerOutput.best` can name."""


@dataclass(slots=True)
class Rows:
    """One sequence's rows in a forward pass.

    Attributes:
        slot: its cache; rows are written behind its settled and pending ones.
        tokens: target id of each row.
        states: `[n, hidden]`: features, or the layer's own outputs; `[n, 0]` where the layer reads none.
        positions: rotary position of each row.
        paths: of rows in a tree, the cache rows that each row sees behind the settled ones, counted from there, its own
            last. None for a chain, whose rows see everything up to themselves.
        sees_all: every row sees all rows of this pass and of the slot; there are no `paths` then.
        depths: of drafted rows, the number of draft tokens up to each, its own included; None for rows of true
            features.
    """

    slot: Slot
    tokens: Sequence[int]
    states: Tensor
    positions: Sequence[int]
    paths: list[list[int]] | None = None
    depths: Sequence[int] | None = None
    sees_all: bool = False

    @property
    def num_rows(self) -> int:
        """Rows of this sequence."""
        return int(self.states.shape[0])

    @property
    def write_at(self) -> int:
        """Cache row of the first."""
        return self.slot.length + self.slot.num_pending


class LayerOutput(Protocol):
    """Output of a pass."""

    @property
    def states(self) -> Tensor:
        """What the layer continues from, `[n, hidden]`, sequences in order."""

    @property
    def logits(self) -> Tensor:
        """Draft logits of the wanted rows, `[k, draft_vocab]` float32."""

    def best(self, count: int) -> tuple[list[list[float]], list[list[int]]]:
        """The likeliest tokens of each wanted row, best first: log-probabilities, and draft ids.

        Args:
            count: how many, at most `MAX_BEST`.
        """

    def with_states_of(self, rows: Sequence[int]) -> LayerOutput:
        """The same output with the states of some rows alone."""


class LayerSizes(Protocol):
    """Sizes that a drafter's features and its cache depend on."""

    hidden: int
    num_kv_heads: int
    head_dim: int
    values_are_keys: bool  # see :class:`paceline.target.kv.slot.KVLayout`
    where: torch.device
    dtype: torch.dtype


class DraftLayer(LayerSizes, Protocol):
    """A draft layer, whatever runs it."""

    def forward(self, rows: Sequence[Rows], wanted: Sequence[int]) -> LayerOutput:
        """Run rows of several sequences, writing their keys and values behind each slot's rows.

        Args:
            rows: one sequence's rows each.
            wanted: rows, counted over all sequences, whose logits are wanted.
        """


@dataclass(frozen=True, slots=True)
class TreeWanted:
    """A tree to grow for one sequence, by :class:`paceline.methods.autoregressive.tree_rule.DynamicRule`.

    Attributes:
        slot: its cache; the tree's rows are written behind its settled and pending rows.
        start: committed length that the tree continues from.
        depth: levels of nodes.
        width: nodes to run at each level.
        branch: children of every node, at most `MAX_BEST`.
        root: the row behind which the tree begins: of an earlier pass, or an index into the wanted rows of this one.
    """

    slot: Slot
    start: int
    depth: int
    width: int
    branch: int
    root: StableRow | int


@dataclass(frozen=True, slots=True)
class GrownTree:
    """A tree that a layer grew. The root's children come first, then those of each row, `branch` each.

    Attributes:
        tokens: target id of each node.
        log_probs: natural log-probability of each node given its path.
        row_nodes: the node that each row ran.
        states: `[rows, hidden]`, the layer's outputs.
    """

    tokens: list[int]
    log_probs: list[float]
    row_nodes: list[int]
    states: Tensor


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


def join_rows(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate along rows; a single part is passed through."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
