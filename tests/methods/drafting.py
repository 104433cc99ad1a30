"""Drafters brought to a text, and asked."""

from __future__ import annotations

from paceline.drafts import DraftEntry
from paceline.methods.drafter import Drafter, DraftRequest
from tests.methods.conftest import Target


def start(drafter: Drafter, target: Target, sequence_id: int, tokens: list[int]) -> None:
    """Opens a sequence with the features of all its tokens but the last."""
    drafter.open(sequence_id, tokens)
    drafter.feed(sequence_id, 0, target.features(drafter, tokens)[:-1])


def entry_of(drafter: Drafter, sequence_id: int, num_tokens: int, **wish: object) -> DraftEntry:
    """One draft."""
    (entry,) = drafter.draft([DraftRequest(sequence_id, num_tokens, **wish)])  # type: ignore[arg-type]
    assert entry is not None
    return entry


def draft(drafter: Drafter, sequence_id: int, num_tokens: int, **wish: object) -> tuple[int, ...]:
    """Its tokens."""
    return entry_of(drafter, sequence_id, num_tokens, **wish).tokens
