"""Follows sequences for drafters that run a whole model: committed tokens, and a slot of the model's cache each.

How drafts are made is in the classes that build on this one: the independent drafter and PARD. `feature_follower.py` is
the counterpart for drafters over the target's features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from paceline.methods.drafter import DrafterError, UnknownDraftSequenceError
from paceline.methods.whole_model.draft_model import DraftModel
from paceline.target import TapSpec


@dataclass(slots=True)
class FollowedText:
    """A sequence: its slot, and its committed tokens in the target's ids."""

    slot: int
    tokens: list[int]

    def commit(self, tokens: Sequence[int]) -> None:
        """Take in committed tokens."""
        self.tokens.extend(tokens)


State = TypeVar("State", bound=FollowedText)


class TextFollower(ABC, Generic[State]):
    """Follows sequences for a drafter with a whole model, as `paceline.methods.drafter.Drafter` says.

    Args:
        model: runs rows.
    """

    def __init__(self, model: DraftModel) -> None:
        self.tap: TapSpec | None = None
        self.longest_draft: int | None = None
        self._model = model
        self._engine = model.engine
        self._sequences: dict[int, State] = {}

    @property
    def max_positions(self) -> int:
        """Positions of the model."""
        return self._engine.shape.max_positions

    @abstractmethod
    def _begin(self, slot: int) -> State:
        """The state of a new sequence, before its first token."""

    def open(self, sequence_id: int, tokens: Sequence[int]) -> None:
        """Start following a sequence."""
        self.close(sequence_id)
        with torch.inference_mode():  # a slot that grew in that mode can only be reused in it
            slot = self._engine.open(len(tokens) + 64)
        state = self._begin(slot)
        state.commit(tokens)
        self._sequences[sequence_id] = state

    def close(self, sequence_id: int) -> None:
        """Forget a sequence."""
        state = self._sequences.pop(sequence_id, None)
        if state is not None:
            self._engine.close(state.slot)

    def extend(self, sequence_id: int, start: int, tokens: Sequence[int]) -> None:
        """Take in committed tokens."""
        state = self._get(sequence_id)
        known = len(state.tokens)
        if start > known:
            raise DrafterError(f"sequence {sequence_id}: tokens {known} to {start - 1} are missing")
        state.commit(tokens[known - start :])

    def feed(self, sequence_id: int, start: int, features: Tensor) -> None:
        """Features are not read."""
        self._get(sequence_id)

    def _get(self, sequence_id: int) -> State:
        try:
            return self._sequences[sequence_id]
        except KeyError:
            raise UnknownDraftSequenceError(f"sequence {sequence_id} is not open") from None
