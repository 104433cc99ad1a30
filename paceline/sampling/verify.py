"""How far a drafted tree agrees with the target's choices.

Responsible for: the verdict, and the walk from the root down the branch that the target chose. A drafted token
is accepted in `TreeWalk.take`.

Deliberately does not know: tensors, how a choice was made, what happens to the KV cache.

Called by: `batch`; tests and simulators call `walk` directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from paceline.draft_tree import DraftTree


class FinalKind(StrEnum):
    """Where the last token of a step came from."""

    RECOVERED = "recovered"
    """The target chose a token that no draft had at that position."""
    BONUS = "bonus"
    """A whole drafted path was accepted, and the target added one more token."""
    PLAIN = "plain"
    """Nothing was drafted: plain decoding."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one sequence commits after a step.

    Attributes:
        accepted_rows: rows of the accepted draft tokens within the sequence's step, top down. Row 0 is the
            root, which is always kept and not listed; row i + 1 is node i of the tree.
        accepted_tokens: the accepted draft tokens.
        final_token: the token that the target adds. The model has not run on it yet: it is the next root.
        kind: where the final token came from.
    """

    accepted_rows: tuple[int, ...]
    accepted_tokens: tuple[int, ...]
    final_token: int
    kind: FinalKind

    @property
    def kept_rows(self) -> tuple[int, ...]:
        """The rows whose keys and values stay in the cache."""
        return (0, *self.accepted_rows)

    @property
    def committed_tokens(self) -> tuple[int, ...]:
        """The tokens added to the text."""
        return (*self.accepted_tokens, self.final_token)


class TreeWalk:
    """A walk down one tree, one choice of the target at a time."""

    def __init__(self, tree: DraftTree) -> None:
        self._children: dict[tuple[int, int], int] = {}  # (parent row, token) -> row
        for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True)):
            self._children.setdefault((parent + 1, token), node + 1)
        self._first_child: dict[int, int] = {}  # row -> row
        for node, parent in enumerate(tree.parents):
            self._first_child.setdefault(parent + 1, node + 1)
        self._inner = {parent + 1 for parent in tree.parents}
        self._rows: list[int] = []
        self._tokens: list[int] = []

    @property
    def row(self) -> int:
        """The row whose choice is needed next."""
        return self._rows[-1] if self._rows else 0

    @property
    def depth(self) -> int:
        """How many draft tokens have been accepted so far."""
        return len(self._rows)

    def rows_ahead(self, count: int) -> list[int]:
        """The row whose choice is needed next, and the rows needed after it if first children are chosen; at most
        `count` in all.
        """
        rows = [self.row]
        while len(rows) < count and rows[-1] in self._first_child:
            rows.append(self._first_child[rows[-1]])
        return rows

    def take(self, choice: int) -> Verdict | None:
        """Follow the target's choice at the current row; a verdict when the walk ends there."""
        row = self.row
        child = self._children.get((row, choice))
        if child is not None:
            self._rows.append(child)
            self._tokens.append(choice)
            return None
        kind = (
            FinalKind.RECOVERED if row in self._inner else FinalKind.BONUS if self._rows else FinalKind.PLAIN
        )
        return Verdict(tuple(self._rows), tuple(self._tokens), choice, kind)


def walk(tree: DraftTree, choices: Sequence[int]) -> Verdict:
    """Accept the branch that the target's choices follow.

    Lossless by construction: every committed token is the target's own choice given the committed tokens before
    it.

    Args:
        tree: the draft.
        choices: the target's choice at the root (index 0) and at node i (index i + 1).
    """
    if len(choices) != len(tree) + 1:
        raise ValueError(f"{len(tree) + 1} rows but {len(choices)} choices")
    if not tree.tokens:
        return Verdict((), (), choices[0], FinalKind.PLAIN)
    walker = TreeWalk(tree)
    while True:
        verdict = walker.take(choices[walker.row])
        if verdict is not None:
            return verdict
