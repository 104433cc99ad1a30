"""The part of the target's vocabulary that a drafter proposes: which tokens, and the maps between both sets of ids.

Pure functions; called by the objectives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.contract.errors import TrainingDataError


def choose_draft_vocab(counts: Tensor, size: int) -> Tensor:
    """The ``size`` most frequent ids, ascending: int64 ``[size]``. Ties go to the smaller id.

    Args:
        counts: how often each token occurs, int64 ``[vocab]``.
        size: tokens to choose.

    Raises:
        TrainingDataError: the target has fewer tokens.
    """
    if size > counts.numel():
        raise TrainingDataError(f"draft vocabulary {size} exceeds the target's {counts.numel()}")
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def rarest_token(counts: Tensor, embedding: Tensor) -> int:
    """The id to use as mask token: least frequent in the text; among equals, the one with the shortest embedding.

    A token that the target hardly ever met has a short embedding, so that little is lost with its row.

    Args:
        counts: how often each token occurs, int64 ``[vocab]``.
        embedding: the target's ``[vocab, hidden]``.
    """
    lengths = embedding.float().norm(dim=-1)
    return int(torch.where(counts == counts.min(), lengths, torch.inf).argmin())


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
