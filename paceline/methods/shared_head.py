"""The target's frozen head under a drafter that proposes through it, perhaps through a part of it only.

Responsible for: which rows of the head propose, and what of that a checkpoint says. Losses read the whole head: the
target's distribution has all tokens. Called by objectives of methods that have no head of their own; serving reads the
same part (:mod:`paceline.methods.target_vocabulary`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.methods.target_vocabulary import TOKEN_MAP
from paceline.training.head import head_best


class SharedHead:
    """A head and the tokens that are proposed through it.

    Args:
        weight: ``[target_vocab, hidden]``.
        draft_ids: the target's id of every token that is proposed, ascending, int64 ``[draft_vocab]``; None for all.
        dtype: compute type.

    Attributes:
        weight: the whole head, in the compute type.
    """

    def __init__(self, weight: Tensor, draft_ids: Tensor | None, dtype: torch.dtype) -> None:
        self.weight = weight.to(dtype)
        self._set(draft_ids)

    @property
    def draft_vocab(self) -> int:
        """Tokens that are proposed."""
        return len(self._part)

    def best(self, hidden: Tensor, count: int) -> Tensor:
        """The target's ids of the ``count`` likeliest of them per row, best first, int64 ``[rows, count]``."""
        best = head_best(hidden, self._part, count)
        return best if self._draft_ids is None else self._draft_ids[best]

    def constants(self) -> dict[str, Tensor]:
        """The map, where it is a part: among a run's constants, and among a checkpoint's tensors."""
        return {} if self._draft_ids is None else {TOKEN_MAP: self._draft_ids}

    def set_constants(self, constants: dict[str, Tensor]) -> None:
        """Puts back what `constants` gave."""
        self._set(constants.get(TOKEN_MAP))

    def shape(self) -> dict[str, int]:
        """What the checkpoint's ``shape`` says of it."""
        return {} if self._draft_ids is None else {"draft_vocab": self.draft_vocab}

    def _set(self, draft_ids: Tensor | None) -> None:
        self._draft_ids = draft_ids
        self._part = self.weight if draft_ids is None else self.weight[draft_ids]
