"""How a bigram drafts: a chain, one token after the other, from the last token alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from paceline.drafts import DraftEntry, DrawRule
from paceline.methods.checkpoint import DrafterConfig, load_tensors
from paceline.methods.choice import choose_chain_tokens, draw_chain_tokens
from paceline.methods.drafter import DrafterError, DraftRequest, OutcomeRequest, UnknownDraftSequenceError
from paceline.methods.sibling_chain import num_draws, sibling_chain_entry
from paceline.target import Device, TapSpec

LAST, NEXT = "last.weight", "next.weight"


def parameter_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """The tables' names and shapes: a row for each token that is read, and for each that is proposed."""
    shape = (config.size("target_vocab"), config.size("rank"))
    return {LAST: shape, NEXT: shape}


class BigramDrafter:
    """Drafts from two tables; see `paceline.methods.drafter.Drafter`."""

    method: ClassVar[str] = "bigram"
    tap: TapSpec | None = None
    longest_draft: int | None = None

    def __init__(self, last: Tensor, following: Tensor, max_positions: int) -> None:
        self._last, self._next = last, following  # [vocab, rank] float32
        self.max_positions = max_positions
        self._texts: dict[int, list[int]] = {}

    @classmethod
    def read_tap(cls, directory: Path, config: DrafterConfig) -> None:
        """Nothing of the target is read."""

    @classmethod
    def load(
        cls, directory: Path, config: DrafterConfig, target_dir: Path, device: Device, dtype: torch.dtype
    ) -> BigramDrafter:
        """Load a checkpoint."""
        tensors = load_tensors(directory, parameter_shapes(config))
        tables = (tensors[name].to(device.torch_device, torch.float32) for name in (LAST, NEXT))
        return cls(*tables, config.size("max_positions"))

    def open(self, sequence_id: int, tokens: Sequence[int]) -> None:
        """Start following a sequence."""
        self._texts[sequence_id] = list(tokens)

    def close(self, sequence_id: int) -> None:
        """Forget a sequence."""
        self._texts.pop(sequence_id, None)

    def extend(self, sequence_id: int, start: int, tokens: Sequence[int]) -> None:
        """Take in committed tokens."""
        text = self._text(sequence_id)
        if start > len(text):
            raise DrafterError(f"sequence {sequence_id}: tokens {len(text)} to {start - 1} are missing")
        text.extend(tokens[len(text) - start :])

    def feed(self, sequence_id: int, start: int, features: Tensor) -> None:
        """Features are not read."""
        self._text(sequence_id)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftEntry | None]:
        """A chain for each request, as long as there are positions."""
        return [self._draft(request) for request in requests]

    def draft_outcomes(
        self, requests: Sequence[OutcomeRequest], may_continue: Callable[[], bool] = lambda: True
    ) -> list[DraftEntry | None]:
        """Nothing is drafted past outcomes."""
        return [None] * len(requests)

    def _draft(self, request: DraftRequest) -> DraftEntry | None:
        text = self._text(request.sequence_id)
        start, token = len(text), text[-1]
        count = min(request.num_tokens, self.max_positions - start)
        if count < 1:
            return None
        tokens, log_probs, draws = [], [], []
        for place in range(count):
            logits = (self._last[token] @ self._next.T)[None]  # [1, vocab]
            where = [start + place], [request.sampling]
            if request.draw_rule is DrawRule.TOP:
                chosen, sure = choose_chain_tokens(logits, None, *where)
                token = int(chosen[0])
                tokens.append(token)
                log_probs.append(float(sure[0]))
            else:
                siblings = num_draws(place, count, request.max_nodes)
                rule = [request.draw_rule], [siblings], [request.support_size]
                draws += draw_chain_tokens(logits, None, [start], *where, *rule)
                token = draws[-1].tokens[0]
        if draws:
            return sibling_chain_entry(start, draws)
        return DraftEntry(start, tuple(tokens), tuple(range(-1, count - 1)), tuple(log_probs))

    def _text(self, sequence_id: int) -> list[int]:
        try:
            return self._texts[sequence_id]
        except KeyError:
            raise UnknownDraftSequenceError(f"sequence {sequence_id} is not open") from None
