"""The target's frozen head for a drafter that proposes through it, or through a part of it.

Responsible for the rows of the head that propose tokens, and for their entry in a checkpoint. Losses read the whole
head: the target's distribution has all tokens. Called by objectives of methods without a head of their own; serving
reads the same part (:mod:`paceline.methods.target_vocabulary`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.methods.target_vocabulary import TOKEN_MAP
from paceline.training.head import head_best


class SharedHead:
    """A head and the tokens that it proposes.

    Args:
        weight: ``[target_vocab, hidden]``.
        draft_ids: the target's id of every proposed token, ascending, int64 ``[draft_vocab]``; None for all.
        dtype: compute type.

    Attributes:
        weight: the whole head, in the compute type.
    """

    def __init__(self, weight: Tensor, draft_ids: Tensor | None, dtype: torch.dtype) -> None:
        self.weight = weight.to(dtype)
        self._set(draft_ids)

    @property
    def draft_vocab(self) -> int:
        """Number of proposed tokens."""
        return len(self._part)

    def best(self, hidden: Tensor, count: int) -> Tensor:
        """The target's ids of the ``count`` likeliest proposed tokens per row, best first, int64 ``[rows, count]``."""
        best = head_best(hidden, self._part, count)
        return best if self._draft_ids is None else self._draft_ids[best]

    def constants(self) -> dict[str, Tensor]:
        """The map of a part, for a run's constants and a checkpoint's tensors; nothing for the whole head."""
        return {} if self._draft_ids is None else {TOKEN_MAP: self._draft_ids}

    def set_constants(self, constants: dict[str, Tensor]) -> None:
        """Restores what `constants` gave."""
        self._set(constants.get(TOKEN_MAP))

    def shape(self) -> dict[str, int]:
        """Fields of the checkpoint's ``shape``."""
        return {} if self._draft_ids is None else {"draft_vocab": self.draft_vocab}

    def _set(self, draft_ids: Tensor | None) -> None:
        self._draft_ids = draft_ids
        self._part = self.weight if draft_ids is None else self.weight[draft_ids]
