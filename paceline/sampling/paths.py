"""The text that leads to each row of a drafted tree, as tensors.

Responsible for: which nodes are on the path to a node, and the last tokens before each row. Work grows with
nodes and depth, never with the committed text.

Deliberately does not know: logits, what a rule does with a path.

Called by: the rules of this package that read earlier tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.draft_tree import DraftTree

NO_TOKEN = -1
"""Padding before the beginning of a text; no token id equals it."""


def on_path(tree: DraftTree, device: torch.device) -> Tensor:
    """`[nodes, nodes]` bool: entry (i, j) is true where node j is node i or one of its ancestors."""
    num_nodes = len(tree)
    nodes = torch.arange(num_nodes, device=device)
    parents = torch.tensor(tree.parents, dtype=torch.int64, device=device)
    found = torch.zeros((num_nodes, num_nodes + 1), dtype=torch.bool, device=device)
    at = nodes
    for _ in range(max(tree.depths, default=0)):
        found[nodes, at] = True  # the root, -1, is the last column, which is cut off
        at = torch.where(at >= 0, parents[at], at)
    return found[:, :num_nodes]


def last_tokens(tail: Sequence[int], tree: DraftTree, num_tokens: int, device: torch.device) -> Tensor:
    """The last tokens before each row's choice.

    Args:
        tail: end of the committed text; tokens before it count as absent.
        tree: the drafted nodes.
        num_tokens: how many tokens of the text are wanted.
        device: of the result.

    Returns:
        `[1 + nodes, num_tokens]` int64, oldest first; `NO_TOKEN` where a text is shorter.
    """
    known = list(tail[-num_tokens:]) if num_tokens else []
    # One list: a placeholder for absence, the tail, the nodes. Each entry points to the one before it in its
    # text.
    tokens = torch.tensor([NO_TOKEN, *known, *tree.tokens], dtype=torch.int64, device=device)
    root, first_node = len(known), len(known) + 1
    parents = [root if parent < 0 else first_node + parent for parent in tree.parents]
    before = torch.tensor([0, *range(root), *parents], dtype=torch.int64, device=device)
    at = torch.arange(root, root + 1 + len(tree), device=device)
    columns = []
    for _ in range(num_tokens):
        columns.append(tokens[at])
        at = before[at]
    if not columns:
        return tokens.new_empty((1 + len(tree), 0))
    return torch.stack(columns[::-1], dim=1)
