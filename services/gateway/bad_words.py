"""Bad words as runs of tokens that a completion must not contain.

Responsible for: spelling each word in tokens. Deliberately does not know: how a run is kept out of a text.
Called by: :mod:`services.gateway.requests`.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.contract import limits
from paceline.contract.fields import check_count, check_integer, check_token_id
from services.gateway.tokenizer import ModelTokenizer


def bad_word_runs(
    bad_words: Sequence[str], tokenizer: ModelTokenizer, vocab_size: int
) -> list[tuple[int, ...]]:
    """The runs of tokens that spell bad words: each word at the start of a text, and after a space.

    vLLM does the same (`SamplingParams.update_from_tokenizer`), but drops the run after a space where its length
    differs from the other run's. Here both are forbidden.

    Raises:
        InvalidRequestError: naming the word, such as ``bad_words[3]``.
    """
    check_count("bad_words", len(bad_words), limits.MAX_BAD_WORDS, "texts")
    runs: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(bad_words):
        field = f"bad_words[{index}]"
        check_integer(field, len(word.encode()), 1, limits.MAX_BAD_WORD_BYTES, "bytes")
        stripped = word.lstrip(" ")
        for text in (stripped, f" {stripped}") if stripped else (word,):
            run = tuple(tokenizer.encode_part(text))
            check_integer(field, len(run), 1, limits.MAX_BAD_RUN_TOKENS, "tokens")
            check_token_id(field, max(run), vocab_size)
            runs[run] = None
    return list(runs)
