"""Checks of a GenerateRequest: a field that cannot be honoured is refused by name, never ignored.

Responsible for: every range that the proto names, and defaults. Deliberately does not know: where a request runs,
streams, the text of the completion. Called by: :mod:`services.gateway.servicer`, once per request.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from paceline.contract import limits
from paceline.contract.errors import InvalidRequestError
from paceline.contract.fields import (
    check_count,
    check_integer,
    check_number,
    check_tenant,
    check_token_id,
)
from paceline.v1 import generation_pb2, sampling_pb2
from services.gateway.bad_words import bad_word_runs
from services.gateway.checked_request import CheckedRequest
from services.gateway.prompt import PromptReader
from services.gateway.served_model import ServedModel
from services.gateway.tokenizer import ModelTokenizer
from services.runtime.sampling import check_speculation, log_prob_counts, sampling_params
from services.runtime.tenants import HEADER

# Seeds drawn here fit a JSON number, so that a reader of one can send it back.
_DRAWN_SEED_BITS = 53


class RequestChecker:
    """Turns requests into checked ones.

    Args:
        tokenizer: of the served model.
        max_prompt_bytes: longest text that is tokenised.
    """

    def __init__(self, tokenizer: ModelTokenizer, max_prompt_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._prompts = PromptReader(tokenizer, max_prompt_bytes)

    def check(
        self, request: generation_pb2.GenerateRequest, model: ServedModel, tenant: str = ""
    ) -> CheckedRequest:
        """Check a request against the limits of the served model.

        Args:
            request: as sent.
            model: what is served.
            tenant: from the call's metadata; used where the request itself names no tenant.

        Raises:
            InvalidRequestError: naming the first field that cannot be honoured.
        """
        if request.model and request.model != model.name:
            raise InvalidRequestError(
                "model", f"{request.model[:200]!r} is not served here, {model.name!r} is"
            )
        sampling = check_sampling(request.sampling, model.vocab_size)
        if request.ignore_eos and sampling.HasField("constraint"):
            raise InvalidRequestError(
                "ignore_eos",
                "must be false with a constraint, since a constrained text ends with the end token",
            )
        max_tokens = request.max_tokens if request.HasField("max_tokens") else limits.DEFAULT_MAX_TOKENS
        if request.HasField("max_tokens"):
            check_integer("max_tokens", max_tokens, 1, model.max_positions)
        check_integer("sampling.min_tokens", sampling.min_tokens, 0, max_tokens)
        self._add_bad_words(sampling, request.bad_words, model.vocab_size)
        log_prob_counts(request.log_probs, model.vocab_size)
        stop_token_ids, stop_texts = check_stop(request.stop, model.vocab_size)
        check_speculation(request.speculation)
        if request.HasField("stream_interval"):
            check_integer("stream_interval", request.stream_interval, 1, limits.MAX_STREAM_INTERVAL)
        prompt = self._prompts.token_ids(request, model)
        end_tokens = () if request.ignore_eos else model.eos_token_ids
        return CheckedRequest(
            prompt_token_ids=prompt,
            sampling=sampling,
            # A text that reaches the last position ends with reason LENGTH, as the proto says.
            max_new_tokens=min(max_tokens, model.max_positions - len(prompt)),
            stop_token_ids=stop_token_ids.union(end_tokens),
            stop_texts=stop_texts,
            speculation=request.speculation,
            log_probs=request.log_probs,
            stream_interval=request.stream_interval or 1,
            tenant=check_tenant("tenant", request.tenant) or check_tenant(HEADER, tenant),
        )

    def _add_bad_words(
        self, sampling: sampling_pb2.SamplingParams, bad_words: Sequence[str], vocab_size: int
    ) -> None:
        for run in bad_word_runs(bad_words, self._tokenizer, vocab_size):
            sampling.bad_runs.add(token_ids=run)
        check_count("bad_words", len(sampling.bad_runs), limits.MAX_BAD_RUNS, "runs with sampling.bad_runs")


def check_sampling(sampling: sampling_pb2.SamplingParams, vocab_size: int) -> sampling_pb2.SamplingParams:
    """Check sampling parameters and fill in every default; draw a seed where there is none.

    Raises:
        InvalidRequestError: naming the field, such as ``sampling.top_p``.
    """
    params = sampling_params(sampling, vocab_size)
    check_number("sampling.temperature", params.temperature, 0, limits.MAX_TEMPERATURE)
    check_integer("sampling.top_k", params.top_k, 0, vocab_size)
    checked = sampling_pb2.SamplingParams()
    checked.CopyFrom(sampling)
    checked.temperature = params.temperature
    checked.top_k = params.top_k
    checked.top_p = params.top_p
    checked.min_p = params.min_p
    checked.seed = sampling.seed if sampling.HasField("seed") else secrets.randbits(_DRAWN_SEED_BITS)
    checked.mode = _mode_in_force(sampling.mode, is_greedy=params.is_greedy)
    return checked


def check_num_choices(request: generation_pb2.GenerateRequest) -> int:
    """Completions asked for.

    Raises:
        InvalidRequestError: naming the field.
    """
    num_choices = request.n if request.HasField("n") else 1
    check_integer("n", num_choices, 1, limits.MAX_COMPLETIONS)
    return num_choices


def check_stop(
    conditions: Sequence[sampling_pb2.StopCondition], vocab_size: int
) -> tuple[frozenset[int], tuple[str, ...]]:
    """Check stop conditions and sort them into token ids and texts.

    Raises:
        InvalidRequestError: naming the field, such as ``stop[0].type``.
    """
    check_count("stop", len(conditions), limits.MAX_STOP_CONDITIONS, "conditions")
    token_ids: set[int] = set()
    texts: list[str] = []
    for index, condition in enumerate(conditions):
        where = f"stop[{index}]"
        if condition.type == sampling_pb2.STOP_TYPE_TOKEN:
            check_token_id(f"{where}.token_id", condition.token_id, vocab_size)
            if condition.text:
                raise InvalidRequestError(f"{where}.text", "must be empty for a stop token")
            token_ids.add(condition.token_id)
        elif condition.type == sampling_pb2.STOP_TYPE_TEXT:
            num_bytes = len(condition.text.encode())
            check_integer(f"{where}.text", num_bytes, 1, limits.MAX_STOP_TEXT_BYTES, "bytes")
            if condition.token_id:
                raise InvalidRequestError(f"{where}.token_id", "must be 0 for a stop text")
            texts.append(condition.text)
        else:
            raise InvalidRequestError(f"{where}.type", f"{int(condition.type)} is neither token nor text")
    return frozenset(token_ids), tuple(texts)


def _mode_in_force(mode: sampling_pb2.VerifyMode, *, is_greedy: bool) -> sampling_pb2.VerifyMode:
    if mode == sampling_pb2.VERIFY_MODE_UNSPECIFIED:
        return sampling_pb2.VERIFY_MODE_GREEDY if is_greedy else sampling_pb2.VERIFY_MODE_COUPLED
    if mode != sampling_pb2.VERIFY_MODE_GREEDY and is_greedy:
        raise InvalidRequestError("sampling.mode", "must be greedy at temperature 0")
    return mode
