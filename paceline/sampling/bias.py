"""Logit bias: numbers added to the logits of some tokens.

Responsible for: OpenAI's `logit_bias`. Deliberately does not know: requests, texts; every row gets the same
bias.

Called by: the verifier, through `LogitRule`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.draft_tree import DraftTree


class LogitBias:
    """Biases of one sequence.

    Args:
        biases: (token id below the vocabulary size, number added to its logit); each id once.
    """

    def __init__(self, biases: Sequence[tuple[int, float]]) -> None:
        self._tokens = torch.tensor([token for token, _ in biases], dtype=torch.int64)  # [biases]
        self._values = torch.tensor([value for _, value in biases], dtype=torch.float32)  # [biases]

    def apply(self, logits: Tensor, tree: DraftTree) -> None:
        """Change `[1 + nodes, vocab]` float32 logits in place; see `LogitRule.apply`."""
        if self._tokens.device != logits.device:
            self._tokens, self._values = self._tokens.to(logits.device), self._values.to(logits.device)
        logits[:, self._tokens] = logits[:, self._tokens] + self._values

    def commit(self, tokens: Sequence[int]) -> None:
        """The bias has no state."""
