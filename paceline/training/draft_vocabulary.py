"""Maps between the ids of the target's vocabulary and those of the part of it that a drafter proposes.

Deliberately does not know: how that part was chosen. Called by the objectives.
"""

from __future__ import annotations

import torch
from torch import Tensor


def draft_ids_of(draft_ids: Tensor, vocab: int) -> Tensor:
    """The draft id of every token: int64 ``[vocab]``, -1 for those that are not drafted.

    Args:
        draft_ids: the target's id of every draft id, ascending, int64 ``[draft_vocab]``.
        vocab: of the target.
    """
    found = torch.full((vocab,), -1, dtype=torch.int64)
    found[draft_ids] = torch.arange(len(draft_ids))
    return found


def id_offsets(draft_ids: Tensor) -> Tensor:
    """Target id less draft id, int64 ``[draft_vocab]``: ``d2t`` of EAGLE-3's public format."""
    return draft_ids - torch.arange(len(draft_ids))
