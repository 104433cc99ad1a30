"""One request as the conductor sees it, compared with its plain text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.sampling.params import SamplingParams
from tests.simulation.texts import TIE, PlainText


@dataclass(eq=False)
class Request:
    """One request as the conductor sees it.

    Attributes:
        at: index of the verifier that runs it.
        sequence_id: the verifier's id, 0 until the verifier has answered.
        is_tied: whether its text left the plain one at a tie; what follows cannot be compared.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    plain: PlainText
    max_new_tokens: int
    max_draft_nodes: int
    stop_token_ids: frozenset[int]
    at: int
    key: int = 0
    sequence_id: int = 0
    epoch: int = 0
    tokens: list[int] = field(default_factory=list)
    finish: int = 0
    is_cancelled: bool = False
    is_tied: bool = False

    @property
    def is_done(self) -> bool:
        """Whether no more tokens can arrive."""
        return bool(self.finish) or self.is_cancelled

    @property
    def expected(self) -> tuple[int, ...]:
        """The whole text, cut at its first stop token or limit."""
        tokens = self.plain.tokens[: self.max_new_tokens]
        for place, token in enumerate(tokens):
            if token in self.stop_token_ids:
                return tokens[: place + 1]
        return tokens

    def commit(self, start: int, tokens: Sequence[int]) -> None:
        """Append committed tokens, and compare them with the plain text."""
        assert not self.is_done, "tokens after the end"
        assert start == len(self.prompt) + len(self.tokens), f"tokens from {start}, not in order"
        for token in tokens:
            place = len(self.tokens)
            self.tokens.append(token)
            if self.is_tied or (place < len(self.expected) and token == self.expected[place]):
                continue
            gap = self.plain.gaps[place] if place < len(self.expected) else 1.0
            assert gap < TIE, (
                f"token {place} of {self.prompt} is not the plain one (gap {gap:g}): {self.tokens}"
            )
            self.is_tied = True
