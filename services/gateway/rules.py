"""Checks of what a request forbids, favours or punishes, and bad words as runs of tokens.

Responsible for: naming the very entry that is out of range. Deliberately does not know: how rules are applied.

Called by: :mod:`services.gateway.requests`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.contract.errors import InvalidRequestError
from paceline.sampling.params import (
    MAX_BAD_RUN_TOKENS,
    MAX_BAD_RUNS,
    MAX_BIAS,
    MAX_BIASES,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
)
from paceline.v1 import sampling_pb2
from services.gateway.tokenizer import ModelTokenizer

MAX_BAD_WORDS = 64
MAX_BAD_WORD_BYTES = 256


def check_rules(sampling: sampling_pb2.SamplingParams, vocab_size: int) -> None:
    """Checks penalties, biases and forbidden runs.

    Raises:
        InvalidRequestError: naming the field, such as ``sampling.logit_bias[50000]``.
    """
    repetition = sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0
    in_range("sampling.repetition_penalty", repetition, 0.0, MAX_REPETITION_PENALTY)
    if repetition == 0:
        raise InvalidRequestError("sampling.repetition_penalty", "must be above 0")
    in_range("sampling.presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    in_range("sampling.frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    if len(sampling.logit_bias) > MAX_BIASES:
        raise InvalidRequestError(
            "sampling.logit_bias",
            f"has {len(sampling.logit_bias)} entries, at most {MAX_BIASES} are possible",
        )
    for token, bias in sampling.logit_bias.items():
        token_in_vocabulary(f"sampling.logit_bias[{token}]", token, vocab_size)
        in_range(f"sampling.logit_bias[{token}]", bias, -MAX_BIAS, MAX_BIAS)
    if len(sampling.bad_runs) > MAX_BAD_RUNS:
        raise InvalidRequestError(
            "sampling.bad_runs", f"has {len(sampling.bad_runs)} runs, at most {MAX_BAD_RUNS} are possible"
        )
    for index, run in enumerate(sampling.bad_runs):
        in_range(f"sampling.bad_runs[{index}].token_ids", len(run.token_ids), 1, MAX_BAD_RUN_TOKENS, "tokens")
        for place, token in enumerate(run.token_ids):
            token_in_vocabulary(f"sampling.bad_runs[{index}].token_ids[{place}]", token, vocab_size)


def bad_word_runs(
    bad_words: Sequence[str], tokenizer: ModelTokenizer, vocab_size: int
) -> list[tuple[int, ...]]:
    """The runs of tokens that spell bad words: each as it stands, as at a text's start, and after a space.

    vLLM does the same (`SamplingParams.update_from_tokenizer`), but drops the run after a space where it differs in
    length from the other; here both are forbidden.

    Raises:
        InvalidRequestError: naming the word, such as ``bad_words[3]``.
    """
    if len(bad_words) > MAX_BAD_WORDS:
        raise InvalidRequestError(
            "bad_words", f"has {len(bad_words)} texts, at most {MAX_BAD_WORDS} are possible"
        )
    runs: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(bad_words):
        field = f"bad_words[{index}]"
        in_range(field, len(word.encode()), 1, MAX_BAD_WORD_BYTES, "bytes")
        stripped = word.lstrip(" ")
        for text in (stripped, f" {stripped}") if stripped else (word,):
            run = tuple(tokenizer.encode_part(text))
            in_range(field, len(run), 1, MAX_BAD_RUN_TOKENS, "tokens")
            for token in run:
                token_in_vocabulary(field, token, vocab_size)
            runs[run] = None
    return list(runs)


def in_range(field: str, value: float, low: float, high: float, unit: str = "") -> None:
    """Refuses a number that is not finite or not within bounds, which are allowed themselves.

    Raises:
        InvalidRequestError: naming the field.
    """
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidRequestError(field, f"must be from {low} to {high}{unit and ' '}{unit}, got {value}")


def token_in_vocabulary(field: str, token_id: int, vocab_size: int) -> None:
    """Refuses a token that the model does not have.

    Raises:
        InvalidRequestError: naming the field.
    """
    if token_id >= vocab_size:
        raise InvalidRequestError(field, f"{token_id} is outside the vocabulary of {vocab_size} tokens")
