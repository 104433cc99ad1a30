"""A smallest length: no stop token before the completion has a number of tokens.

Responsible for: masking stop tokens while the completion is too short. Deliberately does not know: stop texts
(the gateway compares them), and limits on length.

Called by: the verifier, through `LogitRule`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from paceline.draft_tree import DraftTree


class MinTokens:
    """The smallest length of one sequence.

    Args:
        min_tokens: least tokens of the completion before it may stop.
        stop_token_ids: ids below the vocabulary size.
        num_tokens: tokens of the completion so far.
    """

    def __init__(self, min_tokens: int, stop_token_ids: Iterable[int], num_tokens: int = 0) -> None:
        self._num_missing = min_tokens - num_tokens
        self._stop_tokens = torch.tensor(sorted(stop_token_ids), dtype=torch.int64)  # [stop tokens]

    def apply(self, logits: Tensor, tree: DraftTree) -> None:
        """Mask in `[1 + nodes, vocab]` float32 logits, in place; see `LogitRule.apply`."""
        if self._num_missing <= 0:
            return
        depths = torch.tensor([0, *tree.depths], dtype=torch.int64, device=logits.device)
        rows = (depths < self._num_missing).nonzero()  # [short rows, 1]
        logits[rows, self._stop_tokens.to(logits.device)] = -torch.inf

    def commit(self, tokens: Sequence[int]) -> None:
        """Count committed tokens."""
        self._num_missing -= len(tokens)
