"""From Python's arguments to a GenerateRequest.

Responsible for: the forms of a prompt and the names of parameters. The server checks ranges, so that they are
checked in one place. Deliberately does not know: calls. Called by the two clients.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict

from paceline.contract.errors import InvalidRequestError
from paceline.v1 import generation_pb2, sampling_pb2


class Message(TypedDict):
    """One turn of a conversation; roles are "system", "user" and "assistant"."""

    role: str
    content: str


Prompt = str | Sequence[Message] | Sequence[int]
"""A text, a conversation, or token ids."""

COMPLETION_INTERVAL = 32
"""Tokens that are sent together when only the whole text is wanted."""

_MODES = {
    None: sampling_pb2.VERIFY_MODE_UNSPECIFIED,
    "greedy": sampling_pb2.VERIFY_MODE_GREEDY,
    "coupled": sampling_pb2.VERIFY_MODE_COUPLED,
    "rejection": sampling_pb2.VERIFY_MODE_REJECTION,
    "block": sampling_pb2.VERIFY_MODE_BLOCK,
    "typical": sampling_pb2.VERIFY_MODE_TYPICAL,
}


def build_request(
    prompt: Prompt,
    *,
    model: str = "",
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    mode: str | None = None,
    repetition_penalty: float | None = None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    logit_bias: Mapping[int, float] | None = None,
    bad_words: Sequence[str] = (),
    bad_runs: Sequence[Sequence[int]] = (),
    min_tokens: int | None = None,
    log_probs: int | None = None,
    prompt_log_probs: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    speculation: bool = True,
    max_draft_tokens: int | None = None,
    drafter: str = "",
    reads_features: bool | None = None,
    stream_interval: int | None = None,
    json_schema: str | Mapping[str, Any] | None = None,
    json_object: bool = False,
    regex: str | None = None,
    grammar: str | None = None,
    choice: Sequence[str] | None = None,
    tenant: str = "",
) -> generation_pb2.GenerateRequest:
    """Builds a request; absent parameters take the server's defaults.

    Args:
        prompt: a text, a conversation (rendered with the model's chat template) or token ids.
        model: name of the model; empty takes the served one.
        max_tokens: most tokens to generate.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens.
        top_p: keep the smallest set with this probability mass.
        min_p: drop tokens less likely than this fraction of the likeliest.
        seed: same seed and prompt, same text.
        mode: "greedy", "coupled", "rejection", "block" or "typical" (which is not exact); with None the
            temperature chooses between the first two.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or completion.
        presence_penalty: subtracted from the logit of each token that the completion contains.
        frequency_penalty: subtracted once for each occurrence in the completion.
        logit_bias: numbers added to logits, by token id.
        bad_words: texts that never occur in the completion.
        bad_runs: runs of token ids that never occur in it.
        min_tokens: least number of tokens before a stop token or a stop text may end the text.
        log_probs: log-probabilities of the completion's tokens, and of this many likeliest tokens for each.
        prompt_log_probs: the same for the prompt's tokens.
        n: completions; the one with index i has the seed plus i.
        stop: the text ends before any of these texts.
        stop_token_ids: the text ends after any of these tokens.
        ignore_eos: continue after the model's end token.
        speculation: False for plain decoding.
        max_draft_tokens: upper bound of the draft length.
        stream_interval: tokens that are sent together; the first token and the end are sent at once.
        drafter: name, method or endpoint of the drafter to use; empty takes any.
        reads_features: False drafts without the target's features, True only with them; with None the drafter
            decides.
        json_schema: the completion is JSON of this schema, given as an object or as JSON text.
        json_object: the completion is any JSON object.
        regex: the whole completion matches this regular expression.
        grammar: the completion belongs to this context-free grammar, in Lark's notation.
        choice: the completion is one of these texts. At most one of these five may be given.
        tenant: name of the tenant, for the server's statistics.

    Raises:
        InvalidRequestError: an argument does not fit into the request's field.
    """
    if mode not in _MODES:
        known = ", ".join(name for name in _MODES if name)
        raise InvalidRequestError("sampling.mode", f"{mode!r} is none of {known}")
    sampling_fields = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "min_tokens": min_tokens,
    }
    request = generation_pb2.GenerateRequest(model=model, ignore_eos=ignore_eos, tenant=tenant)
    request.speculation.disabled = not speculation
    request.sampling.mode = _MODES[mode]
    for name, value in sampling_fields.items():
        _set(request.sampling, name, value, f"sampling.{name}")
    _set(request, "max_tokens", max_tokens, "max_tokens")
    request.speculation.drafter = drafter
    _set(request.speculation, "max_draft_tokens", max_draft_tokens, "speculation.max_draft_tokens")
    _set(request.speculation, "reads_features", reads_features, "speculation.reads_features")
    _set(request, "n", n, "n")
    _set(request, "stream_interval", stream_interval, "stream_interval")
    _set(request.log_probs, "num_top", log_probs, "log_probs.num_top")
    _set(request.log_probs, "num_prompt_top", prompt_log_probs, "log_probs.num_prompt_top")
    for token_id, bias in (logit_bias or {}).items():
        with _naming(f"sampling.logit_bias[{token_id}]", bias):
            request.sampling.logit_bias[token_id] = bias
    for index, run in enumerate(bad_runs):
        with _naming(f"sampling.bad_runs[{index}]", run):
            request.sampling.bad_runs.add(token_ids=run)
    with _naming("bad_words", bad_words):
        request.bad_words.extend((bad_words,) if isinstance(bad_words, str) else bad_words)
    for text in (stop,) if isinstance(stop, str) else stop:
        request.stop.add(type=sampling_pb2.STOP_TYPE_TEXT, text=text)
    for token_id in stop_token_ids:
        _set(request.stop.add(type=sampling_pb2.STOP_TYPE_TOKEN), "token_id", token_id, "stop.token_id")
    _set_constraint(
        request.sampling,
        json_schema=json_schema,
        json_object=json_object or None,
        regex=regex,
        grammar=grammar,
        choice=choice,
    )
    _set_prompt(request, prompt)
    return request


def for_completion(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a call that returns the whole text: tokens are sent in groups, since nobody reads the stream."""
    return {"stream_interval": COMPLETION_INTERVAL} | dict(parameters)


def check_single(parameters: Mapping[str, object]) -> None:
    """Refuses several choices for a method that returns one completion.

    Raises:
        InvalidRequestError: names ``n``.
    """
    if parameters.get("n") not in (None, 1):
        raise InvalidRequestError("n", "complete returns one completion; call complete_many for several")


def _set_constraint(sampling: sampling_pb2.SamplingParams, **forms: Any) -> None:
    given = {name: value for name, value in forms.items() if value is not None}
    if len(given) > 1:
        raise InvalidRequestError("sampling.constraint", f"only one is possible, not {' and '.join(given)}")
    for name, value in given.items():
        field = f"sampling.constraint.{name}"
        if name == "choice":
            if isinstance(value, str):
                raise InvalidRequestError(field, "is a list of texts, not one text")
            sampling.constraint.choice.SetInParent()
            try:
                sampling.constraint.choice.texts.extend(value)
            except TypeError as error:
                raise InvalidRequestError(field, str(error)) from error
        elif name == "json_schema" and not isinstance(value, str):
            try:
                sampling.constraint.json_schema = json.dumps(value, ensure_ascii=False, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise InvalidRequestError(field, f"is not JSON: {error}") from error
        else:
            _set(sampling.constraint, name, value, field)


def _set_prompt(request: generation_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
        return
    turns = [part for part in prompt if isinstance(part, Mapping)]
    token_ids = [part for part in prompt if isinstance(part, int)]
    if prompt and len(turns) == len(prompt):
        for turn in turns:
            request.chat.messages.add(role=turn["role"], content=turn["content"])
    elif len(token_ids) == len(prompt):
        request.tokens.SetInParent()
        try:
            request.tokens.token_ids.extend(token_ids)
        except ValueError as error:
            raise InvalidRequestError("tokens.token_ids", str(error)) from error
    else:
        raise InvalidRequestError(
            "prompt", "is neither a text, nor a list of messages, nor a list of token ids"
        )


def _set(message: object, name: str, value: float | None, field: str) -> None:
    if value is None:
        return
    with _naming(field, value):
        setattr(message, name, value)


@contextmanager
def _naming(field: str, value: object) -> Iterator[None]:
    """Names the field whose value fails protobuf's own check of type and width."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(field, f"{value!r} does not fit: {error}") from error
