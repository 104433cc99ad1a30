"""What a request forbids, favours or penalises, given the text before each token.

Responsible for: the protocol of a rule. A rule changes a sequence's logits before temperature, filters, noise
and any decision, at the root and at every drafted node, each time for the text that leads to that row. So the
committed text never depends on what was drafted.

Deliberately does not know: which rules exist, noise, verification, models.

Called by: the verifier, which makes a sequence's rules when it opens and passes them what was committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from paceline.contract.errors import InvalidRequestError
from paceline.draft_tree import DraftTree


class RuleError(InvalidRequestError):
    """A rule left no token to choose. Its sequence ends with this error; other sequences are not affected.

    ``field`` names the sampling parameter behind the rule.
    """


@runtime_checkable
class DraftFilter(Protocol):
    """A rule that knows before the forward pass which drafted nodes cannot be accepted."""

    def keep(self, tree: DraftTree) -> DraftTree:
        """The nodes that may be accepted. Dropping the others saves their rows and changes no text."""


class LogitRule(Protocol):
    """One rule of one sequence, with its own state of the committed text."""

    def apply(self, logits: Tensor, tree: DraftTree) -> None:
        """Change the logits of a step in place.

        Args:
            logits: `[1 + nodes, vocab]` float32. Row 0 chooses the token after the committed text. Row i + 1
                chooses the token after node i: its text is the committed one and the path from the root to node
                i.
            tree: the drafted nodes. It may contain a node that the rule itself forbids; that node's row does
                not matter.

        Raises:
            RuleError: no token can be chosen.
        """

    def commit(self, tokens: Sequence[int]) -> None:
        """Add committed tokens to the rule's state.

        Raises:
            RuleError: the rule forbids one of them.
        """
