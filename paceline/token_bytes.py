"""What each token of a `tokenizer.json` adds to a text, as bytes.

Responsible for: the two families of decoders that generative models use. Deliberately does not know: characters,
streams, models. Called by the gateway's detokenizer, and by drafters whose tokenizer is not the target's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from paceline.contract.errors import TokenizerError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """The printable stand-ins that byte-level vocabularies use for the 256 bytes (Radford et al. 2019, section 2.2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


class TokenBytes:
    """The bytes that each token adds to a text.

    Knows the two families of decoders that generative models use: byte level (GPT-2, Llama 3, Qwen, SmolLM) and byte
    fallback (Llama 2, Mistral, Gemma). Special tokens add nothing.

    Raises:
        TokenizerError: the tokenizer decodes by a rule whose text could change after it was sent.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special)
        self._cache: dict[int, bytes] = {}
        self._alphabet: dict[str, int] | None = None
        self._has_byte_tokens = False
        self._replacements: list[tuple[str, str]] = []
        self.leading_strip: tuple[str, int] = ("", 0)
        if tokenizer.decoder is None:
            raise TokenizerError("tokenizer.json names no decoder, so its text cannot be put together")
        for step in _decoder_steps(json.loads(tokenizer.decoder.__getstate__())):
            self._add_step(step)

    def _add_step(self, step: Mapping[str, Any]) -> None:
        kind = step["type"]
        if kind == "ByteLevel":
            self._alphabet = _byte_level_alphabet()
        elif kind == "ByteFallback":
            self._has_byte_tokens = True
        elif kind == "Replace" and "String" in step["pattern"]:
            self._replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Strip" and step["stop"] == 0:
            self.leading_strip = (step["content"], int(step["start"]))
        elif kind != "Fuse":
            raise TokenizerError(f"decoder step {kind!r} of tokenizer.json cannot be streamed")

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens that add nothing because they are special."""
        return self._special

    def __getitem__(self, token_id: int) -> bytes:
        """Bytes of one token; empty for special tokens and for ids that the tokenizer does not name."""
        piece = self._cache.get(token_id)
        if piece is None:
            piece = self._cache[token_id] = self._make(token_id)
        return piece

    def _make(self, token_id: int) -> bytes:
        token = None if token_id in self._special else self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._alphabet is not None:
            # An added token such as "<tool call>" has characters outside the alphabet and stands for itself.
            values = [self._alphabet.get(character) for character in token]
            known = [value for value in values if value is not None]
            return bytes(known) if len(known) == len(values) else token.encode()
        for old, new in self._replacements:
            token = token.replace(old, new)
        match = _BYTE_TOKEN.fullmatch(token) if self._has_byte_tokens else None
        return bytes([int(match[1], 16)]) if match else token.encode()


def _decoder_steps(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Flattens nested sequences of decoder steps."""
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _decoder_steps(part)]
