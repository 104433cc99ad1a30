"""Kept prefixes: keys, values and features of texts that have ended, for new texts that begin alike.

Keeps slots after their sequence ended, within a limit of bytes, and finds the one that shares the longest prefix with a
new text. The content of a slot depends on its tokens alone, so that texts with different sampling parameters share it.
One cache belongs to one engine and so to one model. It does not know requests, sampling or transports. Called by the
verifier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.target.engine import TargetEngine

MIN_PREFIX_TOKENS = 8
"""Shorter prefixes are not worth a slot: running them takes no longer than finding and copying them."""

_CHUNK = 64

FirstFeatures = Callable[[int], Tensor]


def common_prefix(one: Sequence[int], other: Sequence[int], limit: int | None = None) -> int:
    """How many leading tokens two texts of one type share, at most `limit`; microseconds for thousands."""
    end = min(len(one), len(other)) if limit is None else min(len(one), len(other), limit)
    for begin in range(0, end, _CHUNK):
        stop = min(begin + _CHUNK, end)
        if one[begin:stop] != other[begin:stop]:
            for place in range(begin, stop):  # no difference where only the types of the two differ
                if one[place] != other[place]:
                    return place
    return end


@dataclass(slots=True, eq=False)
class KeptPrefix:
    """The beginning of a text that has ended.

    Attributes:
        tokens: in the slot, one token a row.
        slot: an open slot with as many settled rows.
        features: gives the features of its first n tokens, `[n, width]` of the engine's first tap; None where none were
            taken. Called only when they are needed: most prefixes never need them.
        num_bytes: of the slot, its unused capacity included.
    """

    tokens: list[int]
    slot: int
    features: FirstFeatures | None
    num_bytes: int


class PrefixCache:
    """Kept prefixes, the least recently used first; not thread-safe, as the engine is not.

    Args:
        engine: owns the slots.
        limit_bytes: most bytes of kept slots; 0 keeps none.
    """

    def __init__(self, engine: TargetEngine, limit_bytes: int) -> None:
        self._engine = engine
        self._limit_bytes = limit_bytes
        self._kept: list[KeptPrefix] = []

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def used_bytes(self) -> int:
        """Bytes of kept slots."""
        return sum(kept.num_bytes for kept in self._kept)

    def keep(self, slot: int, tokens: Sequence[int], features: FirstFeatures | None) -> None:
        """Take over the slot of a text that has ended, or close it at once where keeping it is of no use.

        A kept prefix that the new text begins with is dropped: the new one serves for it.

        Args:
            slot: settled, with at least `len(tokens)` rows; later rows are forgotten.
            tokens: of its rows.
            features: see `KeptPrefix`; for at least `len(tokens)` tokens.
        """
        text, num_bytes = list(tokens), self._engine.cache.slot_bytes(slot)
        if len(text) < MIN_PREFIX_TOKENS or num_bytes > self._limit_bytes or self._is_known(text, features):
            self._engine.close(slot)
            return
        self._engine.truncate(slot, len(text))
        for kept in list(self._kept):
            is_covered = common_prefix(kept.tokens, text) == len(kept.tokens)
            if is_covered and (features is not None or kept.features is None):
                self._drop(kept)
        while self.used_bytes + num_bytes > self._limit_bytes:
            self._drop(self._kept[0])
        self._kept.append(KeptPrefix(text, slot, features, num_bytes))

    def find(
        self, tokens: Sequence[int], limit: int, *, needs_features: bool
    ) -> tuple[KeptPrefix, int] | None:
        """The kept prefix that shares most tokens with a text, and how many; None where they are too few.

        Args:
            tokens: the text.
            limit: most tokens to use: the last token must be run for its logits.
            needs_features: skip prefixes that were kept without features.
        """
        best: tuple[KeptPrefix, int] | None = None
        for kept in reversed(self._kept):
            if needs_features and kept.features is None:
                continue
            shared = common_prefix(kept.tokens, tokens, limit)
            if shared >= MIN_PREFIX_TOKENS and (best is None or shared > best[1]):
                best = kept, shared
        return best

    def touch(self, kept: KeptPrefix) -> None:
        """Make a kept prefix the most recently used."""
        self._kept.remove(kept)
        self._kept.append(kept)

    def take(self, kept: KeptPrefix) -> int:
        """Hand the slot of a kept prefix over to the caller and forget the prefix."""
        self._kept.remove(kept)
        return kept.slot

    def evict(self, spared: KeptPrefix | None = None) -> bool:
        """Close the least recently used slot other than `spared`'s; False where there is none."""
        for kept in self._kept:
            if kept is not spared:
                self._drop(kept)
                return True
        return False

    def _is_known(self, text: list[int], features: FirstFeatures | None) -> bool:
        return any(
            common_prefix(kept.tokens, text) == len(text) and (features is None or kept.features is not None)
            for kept in self._kept
        )

    def _drop(self, kept: KeptPrefix) -> None:
        self._kept.remove(kept)
        self._engine.close(kept.slot)
