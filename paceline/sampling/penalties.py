"""Repetition, presence and frequency penalties.

Responsible for: lowering the logits of tokens that the text contains, at every drafted node for the path to
that node.

Deliberately does not know: requests, other rules, noise.

Called by: the verifier, through `LogitRule`.

Semantics and order are vLLM's (`vllm/model_executor/layers/utils.py`, apply_penalties): first repetition
(Keskar et al., arXiv 1909.05858, section 4.1, over prompt and completion), then frequency, then presence
(OpenAI's definition, over the completion alone).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.draft_tree import DraftTree
from paceline.sampling.paths import on_path


class Penalties:
    """The three penalties of one sequence.

    Counts are updated when tokens are committed. A step touches the columns of the distinct tokens of the text,
    at most the vocabulary, and one entry for every node on the path to a row. Both use the same operations on
    single numbers, so that an entry has the same bits either way.

    Args:
        vocab_size: number of logits.
        prompt: tokens before the completion; below `vocab_size`.
        completion: tokens of the completion so far.
        repetition: above 0; 1 changes nothing.
        presence: subtracted from each token that the completion contains.
        frequency: subtracted for each occurrence in the completion.
    """

    def __init__(
        self,
        vocab_size: int,
        prompt: Sequence[int],
        completion: Sequence[int] = (),
        *,
        repetition: float = 1.0,
        presence: float = 0.0,
        frequency: float = 0.0,
    ) -> None:
        self._repetition = repetition
        self._presence = presence
        self._frequency = frequency
        self._counts = torch.zeros(vocab_size)  # [vocab] float32: how often the completion has each token
        self._is_known = torch.zeros(vocab_size, dtype=torch.bool)  # [vocab]: whether a penalty may apply
        self._known = torch.empty(0, dtype=torch.int64)  # [distinct tokens]: ids to which one may apply
        if repetition != 1:  # only this penalty reads the prompt
            self._note(torch.tensor(prompt, dtype=torch.int64))
        self.commit(completion)

    def commit(self, tokens: Sequence[int]) -> None:
        """Count committed tokens."""
        added = torch.tensor(tokens, dtype=torch.int64, device=self._counts.device)
        self._counts.index_add_(0, added, torch.ones_like(added, dtype=torch.float32))
        self._note(added)

    def apply(self, logits: Tensor, tree: DraftTree) -> None:
        """Change `[1 + nodes, vocab]` float32 logits in place; see `LogitRule.apply`."""
        self._move_to(logits.device)
        rows, tokens, counts = self._path_entries(tree, logits.device)
        values = self._penalised(logits[rows, tokens], counts)  # read before the columns change them
        columns = self._known.expand(logits.shape[0], -1)  # [rows, distinct tokens]
        logits.scatter_(1, columns, self._penalised(logits.gather(1, columns), self._counts[self._known]))
        logits[rows, tokens] = values

    def _path_entries(self, tree: DraftTree, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, tokens and counts `[entries]` of the tokens on the paths; a token may occur twice."""
        tokens = torch.tensor(tree.tokens, dtype=torch.int64, device=device)
        path = on_path(tree, device)
        is_same = (tokens.unsqueeze(0) == tokens.unsqueeze(1)).to(torch.float32)
        on_way = (
            path.to(torch.float32) @ is_same
        )  # [nodes, nodes]: how often the path to i has node j's token
        nodes, others = path.nonzero(as_tuple=True)
        return nodes + 1, tokens[others], self._counts[tokens[others]] + on_way[nodes, others]

    def _penalised(self, values: Tensor, counts: Tensor) -> Tensor:
        """Penalised logits of tokens that the text contains. Each number is computed alone and unfused, so that
        shapes do not matter.
        """
        if self._repetition != 1:
            values = torch.where(values > 0, values / self._repetition, values * self._repetition)
        if self._frequency:
            values = values - counts * self._frequency
        if self._presence:
            values = values - (counts > 0) * self._presence
        return values

    def _note(self, tokens: Tensor) -> None:
        fresh = tokens.unique()
        fresh = fresh[~self._is_known[fresh]]
        self._is_known[fresh] = True
        self._known = torch.cat([self._known, fresh])

    def _move_to(self, device: torch.device) -> None:
        if self._counts.device != device:
            self._counts, self._is_known = self._counts.to(device), self._is_known.to(device)
            self._known = self._known.to(device)
