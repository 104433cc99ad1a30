"""Text grows token by token, never changes, and ends as the tokenizer's own decoding of the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from paceline.contract.errors import TokenizerError
from paceline.token_bytes import TokenBytes
from services.gateway.detokenizer import Detokenizer
from tests.gateway.tiny_model import byte_fallback_tokenizer, byte_level_tokenizer

BYTE_LEVEL = byte_level_tokenizer()
BYTE_LEVEL_PIECES = TokenBytes(BYTE_LEVEL)
BYTE_FALLBACK = byte_fallback_tokenizer()
BYTE_FALLBACK_PIECES = TokenBytes(BYTE_FALLBACK)


def stream(pieces: TokenBytes, token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(pieces)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 3), max_size=40))
def test_any_byte_level_tokens_decode_as_a_whole(token_ids: list[int]) -> None:
    """Also for ids that are no valid text, for special tokens, and for ids that the tokenizer does not know."""
    known = [token_id for token_id in token_ids if token_id < BYTE_LEVEL.get_vocab_size()]
    assert "".join(stream(BYTE_LEVEL_PIECES, token_ids)) == BYTE_LEVEL.decode(known)


@given(st.text(max_size=40))
def test_a_text_comes_back_in_whole_characters(text: str) -> None:
    parts = stream(BYTE_LEVEL_PIECES, BYTE_LEVEL.encode(text, add_special_tokens=False).ids)
    special = ("<|im_start|>", "<|im_end|>")
    if not any(name in text for name in special):
        assert "".join(parts) == text
        assert "\ufffd" in text or all("\ufffd" not in part for part in parts)


@given(st.text(alphabet="abcxyz., äß€😀日本", max_size=30))
def test_byte_fallback_tokens_decode_as_a_whole(text: str) -> None:
    token_ids = BYTE_FALLBACK.encode(("▁" + text).replace(" ", "▁")).ids
    assert "".join(stream(BYTE_FALLBACK_PIECES, token_ids)) == BYTE_FALLBACK.decode(token_ids)


def test_a_character_over_four_tokens_appears_once_and_whole() -> None:
    token_ids = BYTE_LEVEL.encode("a😀b").ids
    parts = stream(BYTE_LEVEL_PIECES, token_ids)
    assert "".join(parts) == "a😀b"
    assert "😀" in parts
    assert parts.count("") == len(token_ids) + 1 - 3


def test_an_incomplete_character_becomes_a_replacement_character_at_the_end_only() -> None:
    token_ids = BYTE_LEVEL.encode("😀").ids[:-1]
    parts = stream(BYTE_LEVEL_PIECES, token_ids)
    assert parts[:-1] == [""] * len(token_ids)
    assert parts[-1] == "\ufffd"


def test_a_decoder_that_could_change_sent_text_is_refused() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    with pytest.raises(TokenizerError, match="no decoder"):
        TokenBytes(tokenizer)
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerError, match="WordPiece"):
        TokenBytes(tokenizer)


def test_real_tokenizer(real_model_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(real_model_dir / "tokenizer.json"))
    pieces = TokenBytes(tokenizer)
    text = "Straße, naïve café — 東京 😀👩‍👩‍👧 e\u0301 \r\n\t end<|im_end|>"
    token_ids = tokenizer.encode(text).ids
    parts = stream(pieces, token_ids)
    assert "".join(parts) == tokenizer.decode(token_ids) == text.removesuffix("<|im_end|>")
    assert all("\ufffd" not in part for part in parts)
    everything = list(range(tokenizer.get_vocab_size()))
    assert "".join(stream(pieces, everything)) == tokenizer.decode(everything)
