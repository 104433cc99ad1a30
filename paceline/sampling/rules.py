"""What a request forbids, favours or punishes, given the text before each token.

Responsible for: the protocol of a rule. A rule changes a sequence's logits before temperature, filters, noise and any
decision, at the root and at every drafted node, each time for the text that leads there; so what is committed never
depends on what was drafted.

Deliberately does not know: which rules there are, noise, verification, models.

Called by: the verifier, which makes the rules of a sequence when it opens and tells them what was committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from paceline.contract.errors import InvalidRequestError
from paceline.drafts import DraftTree


class RuleError(InvalidRequestError):
    """A rule leaves no token to choose. Its sequence ends with this error; other sequences are not affected.

    ``field`` names the sampling parameter behind the rule.
    """


@runtime_checkable
class DraftFilter(Protocol):
    """A rule that knows, before anything is run, which drafted nodes cannot be accepted."""

    def keep(self, tree: DraftTree) -> DraftTree:
        """The nodes that may be accepted. Dropping the others saves their rows and changes no text."""


class LogitRule(Protocol):
    """One rule of one sequence, with whatever it remembers of the committed text."""

    def apply(self, logits: Tensor, tree: DraftTree) -> None:
        """Change the logits of a step in place.

        Args:
            logits: `[1 + nodes, vocab]` float32. Row 0 chooses what follows the committed text; row i + 1 what follows
                node i, so that the text before it is the committed one and the path from the root to node i.
            tree: the drafted nodes; a node that the rule itself forbids may be there, and its rows then do not
                matter.

        Raises:
            RuleError: nothing can be chosen any more.
        """

    def commit(self, tokens: Sequence[int]) -> None:
        """Take in what was committed.

        Raises:
            RuleError: it should not have been.
        """
