"""Whether a drafted token is right: a fixed function of seed, text and position.

So a position that is drafted twice gets the same token twice, cycles that are compared meet the same luck, and no draw
depends on what was drafted before. Used by experiments.dials.drafter.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

from experiments.dials.dials import Confidence, Dials

_RIGHT, _PLACE, _RANK, _NOISE, _TOKEN = range(5)
MIN_CONFIDENCE = 1e-4


class Luck:
    """The luck of one text.

    Args:
        dials: chances and seed.
        text: which text it is.
    """

    def __init__(self, dials: Dials, text: int) -> None:
        self._dials = dials
        self._text = text

    def chance(self, position: int) -> float:
        """Chance that the token drafted for a position is right."""
        mean = self._dials.acceptance
        if not self._dials.spread:
            return mean
        width = self._dials.spread * min(mean, 1 - mean)
        return mean + (width if self._draw(_PLACE, position) < 0.5 else -width)

    def is_right(self, position: int) -> bool:
        """Whether it is."""
        return self._draw(_RIGHT, position) < self.chance(position)

    def rank(self, position: int) -> int | None:
        """Which alternative, from 0 on, is the target's token where the drafted one is wrong; None: none of them."""
        draw, rate = self._draw(_RANK, position), self._dials.bonus_hit_rate
        return int(draw / rate * self._dials.num_alternatives) if draw < rate else None

    def wrong_token(self, position: int, right: int, vocab_size: int, which: int = 0) -> int:
        """A token other than `right`; those of different `which`, up to the vocabulary's size, differ."""
        offset = int(self._draw(_TOKEN, position) * (vocab_size - 1))
        return (right + 1 + (offset + which) % (vocab_size - 1)) % vocab_size

    def confidence(self, position: int) -> float:
        """What the drafter says about its token for a position, between 0 and 1."""
        kind = self._dials.confidence
        if kind is Confidence.FLAT:
            said = self._dials.acceptance
        elif kind is Confidence.INVERTED:
            said = 1 - self.chance(position)
        elif kind is Confidence.NOISY:
            said = self._draw(_NOISE, position)
        else:
            said = self.chance(position)
        return min(max(said, MIN_CONFIDENCE), 1.0)

    def _draw(self, purpose: int, position: int) -> float:
        return _uniform(self._dials.seed, self._text, purpose, position)


@lru_cache(maxsize=1 << 16)
def _uniform(seed: int, text: int, purpose: int, position: int) -> float:
    """A number in [0, 1), 53 bits."""
    name = f"{seed} {text} {purpose} {position}".encode()
    return (int.from_bytes(blake2b(name, digest_size=8).digest(), "little") >> 11) / (1 << 53)
