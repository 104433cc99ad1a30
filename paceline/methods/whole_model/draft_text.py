"""The text that a drafter's own model reads, beside the target's tokens.

Turns committed target tokens into ids of the drafter's vocabulary as they arrive, and says how many of the earlier ids
are still valid. The ids after n tokens depend only on those tokens and not on how they arrived, so a drafter that
restarts drafts the same. Called by the independent drafter.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Protocol

from tokenizers import Tokenizer

from paceline.methods.whole_model.intersection import Intersection
from paceline.target import common_prefix
from paceline.token_bytes import TokenBytes

CHUNK_CHARACTERS = 256
"""Length of text after which the next beginning of a word is a seam; text before a seam is never encoded again."""

MAX_CHUNK_CHARACTERS = 1024
"""Text without such a beginning is cut here."""


class DraftText(Protocol):
    """One sequence's committed text in the drafter's ids."""

    @property
    def ids(self) -> list[int]:
        """The ids, in order; not to be changed."""

    @property
    def is_whole(self) -> bool:
        """Whether drafts can continue the text: it has an id, and does not end within a character."""

    def extend(self, tokens: Sequence[int]) -> int:
        """Take in committed target tokens; returns the number of leading ids that did not change."""


class SameText:
    """The drafter's ids are the target's.

    Args:
        vocab: ids of the drafter's model; ids past it, which only pad a target's head, are left out.
    """

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self.ids: list[int] = []

    @property
    def is_whole(self) -> bool:
        """True once there is any id."""
        return bool(self.ids)

    def extend(self, tokens: Sequence[int]) -> int:
        """Append the tokens."""
        kept = len(self.ids)
        self.ids.extend(token for token in tokens if token < self._vocab)
        return kept


class Translation:
    """From a target's tokens to text to a drafter's ids.

    Args:
        target: the target's tokenizer.
        own: the drafter's.
        shared: the tokens that both have.
        own_vocab: ids of the drafter's model.
    """

    def __init__(self, target: Tokenizer, own: Tokenizer, shared: Intersection, own_vocab: int) -> None:
        self.token_bytes = TokenBytes(target)
        self._own = own
        self.special: Mapping[int, int] = shared.special
        self._vocab = own_vocab
        # What the drafter's tokenizer puts before any text, such as <bos>.
        self.beginning = tuple(own.encode("").ids)
        letter = own.encode("a", add_special_tokens=False).tokens
        self._prepends_space = bool(letter) and letter[0][:1] in ("▁", "Ġ")

    def encode(self, text: str) -> list[int]:
        """The drafter's ids of a piece of text."""
        if self._prepends_space and text.startswith(" "):
            text = text[1:]
        ids = self._own.encode(text, add_special_tokens=False).ids if text else []
        return [own_id for own_id in ids if own_id < self._vocab]


class TranslatedText:
    """The drafter's ids are another tokenizer's of the same text.

    The text is encoded as a whole, as the drafter's model would have read it, and not token by token: a token that
    arrives may join the text before it. Special tokens that both tokenizers have by name are passed on, others add
    nothing. A long text is cut where a word begins (`CHUNK_CHARACTERS`), so that it is not encoded again for each
    token; byte-level vocabularies never join across such a place.
    """

    def __init__(self, translation: Translation) -> None:
        self._translation = translation
        self.ids = list(translation.beginning)
        self._num_settled = len(self.ids)  # ids before the chunk
        self._chunk = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def is_whole(self) -> bool:
        """False while the bytes of a character are incomplete, and before there is any id."""
        return not self._decoder.getstate()[0] and bool(self.ids)

    def extend(self, tokens: Sequence[int]) -> int:
        """Take in committed target tokens; ids from the last seam on are made again."""
        first = self._num_settled
        before = self.ids[first:]
        settled: list[int] = []
        for token in tokens:
            if token in self._translation.token_bytes.special_ids:
                self._chunk += self._decoder.decode(b"", final=True)
                self._decoder.reset()
                settled += self._settle()
                settled += self._translation.encode(self._chunk)
                self._chunk = ""
                if token in self._translation.special:
                    settled.append(self._translation.special[token])
                continue
            self._chunk += self._decoder.decode(self._translation.token_bytes[token])
        settled += self._settle()
        fresh = [*settled, *self._translation.encode(self._chunk)]
        self._num_settled = first + len(settled)
        self.ids[first:] = fresh
        return first + common_prefix(before, fresh)

    def _settle(self) -> list[int]:
        """Ids of the chunk up to its last seam; the rest stays."""
        chunks, self._chunk = split_chunks(self._chunk)
        return [own_id for chunk in chunks for own_id in self._translation.encode(chunk)]


def split_chunks(text: str) -> tuple[list[str], str]:
    """The chunks of a text that later text cannot change, and the rest.

    It finds the same seams for a text that grew and for the whole text at once.
    """
    chunks = []
    while (seam := _seam(text)) is not None:
        chunks.append(text[:seam])
        text = text[seam:]
    return chunks, text


def _seam(text: str) -> int | None:
    for place in range(CHUNK_CHARACTERS, min(len(text) - 1, MAX_CHUNK_CHARACTERS)):
        if text[place] == " " and not text[place + 1].isspace() and not text[place - 1].isspace():
            return place
    return MAX_CHUNK_CHARACTERS if len(text) > MAX_CHUNK_CHARACTERS else None
