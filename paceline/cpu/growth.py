"""Trees of draft tokens, grown in one call of the CPU kernels by a program that continues from its own output.

Describes trees to `kernels/grow.c` and reads them back. The rule is EAGLE-2's (Li et al., 2406.16858, section 4): each
level runs the nodes with the largest product of probabilities along their path. This file does not know drafters or
sequences. Called by `paceline.cpu.draft_layer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.cpu import kernels
from paceline.cpu.program import Description, Program
from paceline.cpu.row_segment import RowSegment, describe_segment
from paceline.draft_layer.protocol import GrownTree


@dataclass(frozen=True, slots=True)
class Growth:
    """A tree to grow for one sequence.

    Attributes:
        storage: its cache, as in :class:`RowSegment`.
        past: cache rows that all nodes see; rows of the tree are written behind them.
        position: rotary position of a node at depth d, less d.
        depth: levels of nodes; the last level is not run.
        width: most nodes that are run at each level.
        branch: children that every node proposes, at most as many as the program ranks.
        ranked: `[2 * best]` int32, proposals of the root's row, as `Program.top` writes them.
        state: `[hidden]`, the state that the root's children continue from.
    """

    storage: Tensor
    past: int
    position: int
    depth: int
    width: int
    branch: int
    ranked: Tensor
    state: Tensor

    @property
    def max_rows(self) -> int:
        """Most rows that are run."""
        return (self.depth - 1) * self.width


@dataclass(frozen=True, slots=True)
class GrowingBuffers:
    """Bound buffers of a program that grows trees.

    Attributes:
        states: `[hidden]`, the state that a row continues from.
        out: `[hidden]`, the row's output.
        best: of `Program.top`.
        num_best: its count.
    """

    states: int
    out: int
    best: int
    num_best: int


class _Arrays:
    """The arrays that one tree is written to."""

    def __init__(self, growth: Growth) -> None:
        rows = growth.max_rows
        nodes = growth.branch * (1 + rows)
        self.tokens = np.empty(nodes, dtype=np.int32)
        self.log_probs = np.empty(nodes, dtype=np.float32)
        self.scores = np.empty(nodes, dtype=np.float64)
        self.row_nodes = np.empty(rows, dtype=np.int32)
        self.states = growth.state.new_empty(rows, growth.state.shape[-1])

    def describe(self, growth: Growth, tree: kernels.Tree) -> None:
        tree.depth, tree.width, tree.branch = growth.depth, growth.width, growth.branch
        tree.position = growth.position
        tree.ranked, tree.state = growth.ranked.data_ptr(), growth.state.data_ptr()
        describe_segment(RowSegment(growth.storage, 0, growth.past, growth.past), tree.segment)
        tree.tokens, tree.log_probs = self.tokens.ctypes.data, self.log_probs.ctypes.data
        tree.scores, tree.row_nodes = self.scores.ctypes.data, self.row_nodes.ctypes.data
        tree.states = self.states.data_ptr()

    def read(self, tree: kernels.Tree) -> GrownTree:
        nodes, rows = tree.num_nodes, tree.num_rows
        return GrownTree(
            self.tokens[:nodes].tolist(),
            self.log_probs[:nodes].tolist(),
            self.row_nodes[:rows].tolist(),
            self.states[:rows],
        )


def grow(
    program: Program,
    buffers: GrowingBuffers,
    growths: Sequence[Growth],
    passes: Description,
    *,
    first: Description | None = None,
    token_of: Tensor | None = None,
) -> list[GrownTree]:
    """Grow trees, one level of all of them in a pass.

    Args:
        program: continues from its own output.
        buffers: of the program; `ranked` and `state` of the trees are rows of these buffers.
        growths: the trees.
        passes: describes a run with as many rows as all trees are wide; the passes use its bound tensors.
        first: a run before the passes, of the rows that the trees begin behind.
        token_of: `[vocab]` int64 target id of each id that the program ranks; None where they are the same.

    Raises:
        ValueError: `token_of` has another type or layout.
        IndexError: rows do not fit a slot or the passes, a position is out of range, or the program cannot run a token.
    """
    for growth in growths:
        if not (growth.depth >= 1 and growth.width >= 1 and 1 <= growth.branch <= buffers.num_best):
            raise IndexError(
                f"no tree is {growth.depth} deep, {growth.width} wide, {growth.branch} children a node"
            )
        if growth.past + growth.max_rows > growth.storage.shape[2]:
            raise IndexError(f"{growth.max_rows} rows at {growth.past} do not fit their slot")
        program.check_positions((growth.position + 1, growth.position + growth.depth - 1))
    num_wide = sum(growth.width for growth in growths)
    if passes.step.num_rows < num_wide:
        raise IndexError(f"passes of {passes.step.num_rows} rows for trees {num_wide} wide")
    if token_of is not None and (token_of.dtype != torch.int64 or not token_of.is_contiguous()):
        raise ValueError(f"target ids must be dense int64, not {token_of.dtype}")
    trees = (kernels.Tree * len(growths))()
    arrays = [_Arrays(growth) for growth in growths]
    for growth, own, tree in zip(growths, arrays, trees, strict=True):
        own.describe(growth, tree)
    width = growths[0].state.shape[-1]
    forest = kernels.Forest(
        num_trees=len(growths),
        trees=trees,
        token_of=None if token_of is None else token_of.data_ptr(),
        num_tokens=program.num_tokens,
        width=width,
        in_buffer=buffers.states,
        out_buffer=buffers.out,
        best=buffers.best,
        num_best=buffers.num_best,
    )
    program.grow(first, passes, forest)
    return [own.read(tree) for own, tree in zip(arrays, trees, strict=True)]
