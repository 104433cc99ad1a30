"""Replaying a known text: what counts as foretold, and as accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from experiments.ahead.replay import Cycle, Tally, num_accepted, replay
from experiments.ahead.text import Text
from paceline.drafts import DraftEntry
from paceline.methods.drafter import DraftRequest, OutcomeRequest
from paceline.sampling.params import SamplingParams
from paceline.trie import DraftTrie

PROMPT = [1, 2, 3]
LENGTH = 60


class Prophet:
    """Knows the text; errs at every multiple of `period`, and foretells some of what it errs about."""

    method = "prophet"
    tap = None
    max_positions = 1000
    longest_draft = None

    def __init__(self, text: Sequence[int], period: int, foretells: bool) -> None:
        self.text, self.period, self.foretells = list(text), period, foretells
        self.length = 0

    def open(self, sequence_id: int, tokens: Sequence[int]) -> None:
        self.length = len(tokens)

    def extend(self, sequence_id: int, start: int, tokens: Sequence[int]) -> None:
        assert start == self.length
        assert list(tokens) == self.text[start : start + len(tokens)]
        self.length += len(tokens)

    def feed(self, sequence_id: int, start: int, features: Tensor) -> None:
        assert start + len(features) == self.length - 1

    def says(self, start: int, count: int) -> list[int]:
        """What it drafts from a length on."""
        return [
            token + 500 * ((start + i) % self.period == 0)
            for i, token in enumerate(self.text[start : start + count])
        ]

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftEntry | None]:
        (request,) = requests
        return [DraftEntry.chain(self.length, self.says(self.length, request.num_tokens))]

    def draft_outcomes(
        self, requests: Sequence[OutcomeRequest], may_continue: Callable[[], bool] = lambda: True
    ) -> list[DraftEntry | None]:
        (request,) = requests
        if not self.foretells:
            return [None]
        place = next(i for i in range(99) if (self.length + i) % self.period == 0)
        path = self.text[self.length : self.length + place + 1]
        return [
            DraftEntry.chain(self.length, [*path, *self.says(self.length + len(path), request.num_tokens)])
        ]

    def close(self, sequence_id: int) -> None:
        self.length = 0


@pytest.mark.parametrize("foretells", [True, False])
def test_cycles_hits_and_tokens_are_counted(foretells: bool) -> None:
    tokens = [*PROMPT, *range(10, 10 + LENGTH)]
    text = Text(tokens, len(PROMPT), torch.zeros(len(tokens) - 1, 0), SamplingParams(temperature=0.0))
    tally = Tally()
    replay(Prophet(tokens, 4, foretells), text, Cycle(length=6, max_nodes=6, outcomes=2, ahead=2), tally)
    # From length 4 on every draft errs at its first token; then at every fourth.
    assert tally.num_tokens == 1 + 4 * (tally.num_cycles - 1)
    assert tally.num_cache_hits == (tally.num_cycles - 1 if foretells else 0)
    assert tally.num_fresh == 3 * tally.num_cache_hits
    assert tally.num_ahead == 2 * tally.num_cache_hits  # as far as it drafted ahead
    assert sum(tally.ahead_at) == tally.num_ahead


def test_a_tree_is_accepted_as_far_as_it_is_the_text() -> None:
    trie = DraftTrie([1])
    trie.add(DraftEntry(1, (5, 6, 7, 8), (-1, -1, 1, 2)))
    tree = trie.select_best(9, 9)
    assert [num_accepted(tree, text) for text in ([6, 7, 8, 9], [6, 9], [5, 7], [4], [])] == [3, 1, 1, 0, 0]
