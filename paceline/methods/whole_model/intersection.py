"""Which tokens two tokenizers have in common (token-level intersection, Timor et al., 2502.05202, section 4).

Finds pairs of ids whose tokens add the same bytes to a text. It compares bytes and not the strings in the files: one
family writes a leading space as "Ġ" and the other as "▁", and letters outside ASCII differ too. Called by the
independent drafter when it loads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from paceline.contract.errors import TokenizerError
from paceline.methods.checkpoint import CheckpointError
from paceline.models import tokenizer_fingerprint
from paceline.token_bytes import TokenBytes

FILE_NAME = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """A tokenizer on disk; it equals another one if both map text to the same ids."""

    directory: Path = field(compare=False)
    fingerprint: str

    @classmethod
    def find(cls, *directories: Path) -> TokenizerFile | None:
        """The `tokenizer.json` of the first directory that has one; None if none has."""
        for directory in directories:
            if (directory / FILE_NAME).is_file():
                return cls(directory, tokenizer_fingerprint(directory))
        return None

    def load(self) -> Tokenizer:
        """Read it.

        Raises:
            CheckpointError: it cannot be read.
        """
        try:
            tokenizer = Tokenizer.from_file(str(self.directory / FILE_NAME))
        except Exception as error:  # the library raises bare exceptions
            raise CheckpointError(f"{self.directory.name!r}: {FILE_NAME} cannot be read: {error}") from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer


@dataclass(frozen=True, slots=True)
class Intersection:
    """Tokens that two tokenizers share; each id is in at most one pair.

    Attributes:
        own_ids: the drafter's ids, ascending.
        target_ids: the target's id of each.
        special: the drafter's id of special tokens that both have by name.
    """

    own_ids: tuple[int, ...]
    target_ids: tuple[int, ...]
    special: dict[int, int]


def intersect(
    target_tokenizer: Tokenizer, own_tokenizer: Tokenizer, target_vocab: int, own_vocab: int
) -> Intersection:
    """The intersection of a target's tokenizer and a drafter's.

    Args:
        target_tokenizer: the target's.
        own_tokenizer: the drafter's.
        target_vocab: ids that the target's head has; a tokenizer may name more, a head may be padded.
        own_vocab: the same of the drafter.

    Raises:
        CheckpointError: the two share no token, or one decodes by an unknown rule.
    """
    try:
        target_pieces, own_pieces = TokenBytes(target_tokenizer), TokenBytes(own_tokenizer)
    except TokenizerError as error:
        raise CheckpointError(f"tokens of another tokenizer cannot be compared: {error}") from None
    of_target = _by_bytes(target_tokenizer, target_pieces, target_vocab)
    of_own = _by_bytes(own_tokenizer, own_pieces, own_vocab)
    names = target_tokenizer.get_added_tokens_decoder()
    special = {
        target_id: own_id
        for target_id in target_pieces.special_ids
        if target_id < target_vocab
        and (own_id := own_tokenizer.token_to_id(names[target_id].content)) is not None
        and own_id in own_pieces.special_ids
        and own_id < own_vocab
    }
    pairs = {own_id: of_target[piece] for piece, own_id in of_own.items() if piece in of_target}
    pairs |= {own_id: target_id for target_id, own_id in special.items()}
    if not pairs:
        raise CheckpointError("the drafter's tokenizer and the target's have no token in common")
    own_ids = tuple(sorted(pairs))
    return Intersection(own_ids, tuple(pairs[own_id] for own_id in own_ids), special)


def _by_bytes(tokenizer: Tokenizer, token_bytes: TokenBytes, vocab: int) -> dict[bytes, int]:
    """One id for each run of bytes: of several, the one whose token is written out, then the smallest."""
    found: dict[bytes, tuple[bool, int]] = {}
    for token_id, token in _tokens(tokenizer, vocab):
        piece = token_bytes[token_id]
        if piece:
            is_byte_token = token.startswith("<0x") and len(piece) == 1
            found[piece] = min(found.get(piece, (True, vocab)), (is_byte_token, token_id))
    return {piece: token_id for piece, (_, token_id) in found.items()}


def _tokens(tokenizer: Tokenizer, vocab: int) -> Iterator[tuple[int, str]]:
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id < vocab:
            yield token_id, token
