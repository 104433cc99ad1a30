"""Forbidden runs of tokens; bad words are made of them.

Responsible for: masking the last token of a run wherever the completion ends with the rest of the run. The rest
may begin in the committed text and continue in drafted nodes.

Deliberately does not know: texts, tokenizers; the gateway turns words into runs.

Called by: the verifier, through `LogitRule`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.draft_tree import DraftTree
from paceline.sampling.paths import last_tokens

_ANY = -2  # padding of shorter runs; matches every token


class BadRuns:
    """Runs that never occur in one sequence's completion. The prompt may contain them, as in vLLM.

    Args:
        runs: each of at least one token id below the vocabulary size.
        completion: tokens of the completion so far.
    """

    def __init__(self, runs: Sequence[Sequence[int]], completion: Sequence[int] = ()) -> None:
        self._num_before = max(len(run) for run in runs) - 1
        before = [[_ANY] * (self._num_before - len(run) + 1) + list(run[:-1]) for run in runs]
        self._before = torch.tensor(before, dtype=torch.int64)  # [runs, longest run - 1], ends aligned
        self._last = torch.tensor([run[-1] for run in runs], dtype=torch.int64)  # [runs]
        self._tail: list[int] = []
        self.commit(completion)

    def apply(self, logits: Tensor, tree: DraftTree) -> None:
        """Mask in `[1 + nodes, vocab]` float32 logits, in place; see `LogitRule.apply`."""
        if self._before.device != logits.device:
            self._before, self._last = self._before.to(logits.device), self._last.to(logits.device)
        text = last_tokens(self._tail, tree, self._num_before, logits.device)  # [rows, longest run - 1]
        is_begun = (text.unsqueeze(1) == self._before) | (self._before == _ANY)
        rows, runs = is_begun.all(dim=-1).nonzero(as_tuple=True)
        logits[rows, self._last[runs]] = -torch.inf

    def commit(self, tokens: Sequence[int]) -> None:
        """Add committed tokens."""
        if self._num_before:
            self._tail = [*self._tail, *tokens][-self._num_before :]
