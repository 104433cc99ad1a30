"""How a writer samples a token, and how it notices that a text repeats itself. Pure; called by the writers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MAX_PERIOD = 24
_REPEATED_TOKENS = 48


def sample_nucleus(
    values: Tensor, temperature: Tensor | float, top_p: float, random: torch.Generator
) -> Tensor:
    """A candidate of each row, int64 ``[rows, 1]``.

    Args:
        values: logits of the candidates, largest first, ``[rows, candidates]``.
        temperature: one for all rows, or ``[rows, 1]``.
        top_p: candidates count until their probabilities sum to this.
        random: random numbers.
    """
    probs = (values / temperature).softmax(-1)
    probs[(probs.cumsum(-1) - probs) >= top_p] = 0.0
    return torch.multinomial(probs, 1, generator=random)


def repeats_itself(tokens: Sequence[int]) -> bool:
    """Whether the last 48 tokens equal those one period earlier, for a period of at most 24 tokens."""
    if len(tokens) < _REPEATED_TOKENS + _MAX_PERIOD:
        return False
    tail = tokens[-_REPEATED_TOKENS:]
    return any(tokens[-_REPEATED_TOKENS - p : -p] == tail for p in range(1, _MAX_PERIOD + 1))
