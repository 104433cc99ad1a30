"""What one generation showed at the client."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """One generation.

    Attributes:
        arrivals: of each chunk, the client's clock in seconds and the tokens so far.
        num_passes: target passes that committed tokens.
        is_identical: the text is what plain decoding on the engine gives.
    """

    arrivals: tuple[tuple[float, int], ...]
    num_passes: int
    is_identical: bool

    @property
    def num_tokens(self) -> int:
        """Tokens of the text."""
        return self.arrivals[-1][1] if self.arrivals else 0

    @property
    def tokens_per_s(self) -> float:
        """Speed between the first chunk and the last but one.

        The first comes with the prompt, and the last is cut at the text's end: neither is part of the steady state.

        Raises:
            ValueError: there are too few chunks.
        """
        if len(self.arrivals) < 3:
            raise ValueError("a generation of fewer than three chunks has no speed")
        (first_s, first), (last_s, last) = self.arrivals[0], self.arrivals[-2]
        return (last - first) / (last_s - first_s)
