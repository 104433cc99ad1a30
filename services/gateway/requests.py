"""Checks of a GenerateRequest: what cannot be honoured is refused with the field's name, never ignored.

Responsible for: every range in the contract, defaults, and the prompt's token ids. Deliberately does not know: where
a request runs, streams, text coming back.

Called by: :mod:`services.gateway.servicer`, once per request.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from paceline.contract.errors import InvalidRequestError
from paceline.sampling.params import MAX_BAD_RUNS, MAX_SEED
from paceline.v1 import generation_pb2, orchestrator_pb2, sampling_pb2
from services.gateway.rules import bad_word_runs, check_rules, in_range, token_in_vocabulary
from services.gateway.served_model import ServedModel
from services.gateway.tokenizer import ModelTokenizer
from services.runtime.sampling import check_log_probs, sampling_params
from services.runtime.tenants import HEADER, check_tenant

DEFAULT_MAX_TOKENS = 128
MAX_TEMPERATURE = 100.0
MAX_STOP_CONDITIONS = 8
MAX_STOP_TEXT_BYTES = 256
MAX_DRAFT_TOKENS = 64
MAX_DRAFTER_NAME = 256
MAX_STREAM_INTERVAL = 1024
MAX_MESSAGES = 4096
MAX_CHOICES = 16
_ROLES = ("system", "user", "assistant")
# Seeds drawn here fit a JSON number, so that whoever reads one can send it back.
_DRAWN_SEED_BITS = 53


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request whose every field is in range.

    Attributes:
        prompt_token_ids: at least one, at most one less than the model's positions.
        sampling: all fields set, seed and mode included.
        max_new_tokens: at least 1; never past the model's last position.
        stop_token_ids: the request's and, unless ``ignore_eos``, the model's own.
        stop_texts: in the order of the request.
        speculation: as sent.
        log_probs: as sent; in range.
        stream_interval: tokens that are sent together.
        tenant: whose it is, for statistics; may be empty.
    """

    prompt_token_ids: tuple[int, ...]
    sampling: sampling_pb2.SamplingParams
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    stop_texts: tuple[str, ...]
    speculation: sampling_pb2.SpeculationOptions
    log_probs: sampling_pb2.LogProbOptions = field(default_factory=sampling_pb2.LogProbOptions)
    stream_interval: int = 1
    tenant: str = ""

    def choice(self, index: int) -> CheckedRequest:
        """The request of one of several completions: its own seed, and the prompt's log-probabilities only once."""
        if index == 0:
            return self
        sampling, log_probs = sampling_pb2.SamplingParams(), sampling_pb2.LogProbOptions()
        sampling.CopyFrom(self.sampling)
        sampling.seed = (self.sampling.seed + index) & MAX_SEED
        log_probs.CopyFrom(self.log_probs)
        log_probs.ClearField("num_prompt_top")
        return replace(self, sampling=sampling, log_probs=log_probs)

    def to_run_request(self, request_id: str, generated: Sequence[int] = ()) -> orchestrator_pb2.RunRequest:
        """What a conductor gets; ``generated`` are tokens that an earlier run already streamed.

        The prompt's log-probabilities came with the first of them, and are not asked for again.
        """
        log_probs = sampling_pb2.LogProbOptions()
        log_probs.CopyFrom(self.log_probs)
        if generated:
            log_probs.ClearField("num_prompt_top")
        return orchestrator_pb2.RunRequest(
            request_id=request_id,
            prompt_token_ids=[*self.prompt_token_ids, *generated],
            sampling=self.sampling,
            max_new_tokens=self.max_new_tokens,
            stop_token_ids=sorted(self.stop_token_ids),
            speculation=self.speculation,
            num_resumed_tokens=len(generated),
            log_probs=log_probs,
            stream_interval=self.stream_interval,
            tenant=self.tenant,
        )


class RequestChecker:
    """Turns requests into checked ones.

    Args:
        tokenizer: of the served model.
        max_prompt_bytes: longest text that is tokenised at all.
    """

    def __init__(self, tokenizer: ModelTokenizer, max_prompt_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._max_prompt_bytes = max_prompt_bytes

    def check(
        self, request: generation_pb2.GenerateRequest, model: ServedModel, tenant: str = ""
    ) -> CheckedRequest:
        """Checks a request against the limits of the served model.

        Args:
            request: as sent.
            model: what is served.
            tenant: named beside the request, where the request itself names none.

        Raises:
            InvalidRequestError: naming the first field that cannot be honoured.
        """
        if request.model and request.model != model.name:
            raise InvalidRequestError(
                "model", f"{request.model[:200]!r} is not served here, {model.name!r} is"
            )
        sampling = check_sampling(request.sampling, model.vocab_size)
        if request.ignore_eos and sampling.HasField("constraint"):
            raise InvalidRequestError("ignore_eos", "cannot be: a constrained text ends with the end token")
        max_tokens = request.max_tokens if request.HasField("max_tokens") else DEFAULT_MAX_TOKENS
        if request.HasField("max_tokens"):
            in_range("max_tokens", max_tokens, 1, model.max_positions)
        in_range("sampling.min_tokens", sampling.min_tokens, 0, max_tokens)
        self._add_bad_words(sampling, request.bad_words, model.vocab_size)
        check_log_probs(request.log_probs, model.vocab_size)
        stop_token_ids, stop_texts = check_stop(request.stop, model.vocab_size)
        if request.speculation.HasField("max_draft_tokens"):
            draft_tokens = request.speculation.max_draft_tokens
            in_range("speculation.max_draft_tokens", draft_tokens, 1, MAX_DRAFT_TOKENS)
        if len(request.speculation.drafter) > MAX_DRAFTER_NAME:
            raise InvalidRequestError(
                "speculation.drafter", f"must have at most {MAX_DRAFTER_NAME} characters"
            )
        if request.HasField("stream_interval"):
            in_range("stream_interval", request.stream_interval, 1, MAX_STREAM_INTERVAL)
        prompt = self._prompt(request, model)
        return CheckedRequest(
            prompt_token_ids=prompt,
            sampling=sampling,
            # The last position ends a text with reason LENGTH, as the contract says.
            max_new_tokens=min(max_tokens, model.max_positions - len(prompt)),
            stop_token_ids=stop_token_ids
            | (frozenset() if request.ignore_eos else frozenset(model.eos_token_ids)),
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
        if len(sampling.bad_runs) > MAX_BAD_RUNS:
            raise InvalidRequestError(
                "bad_words",
                f"makes, with sampling.bad_runs, {len(sampling.bad_runs)} runs; at most {MAX_BAD_RUNS} are possible",
            )

    def _prompt(self, request: generation_pb2.GenerateRequest, model: ServedModel) -> tuple[int, ...]:
        form = request.WhichOneof("prompt")
        if form is None:
            raise InvalidRequestError("prompt", "send one of text, chat and tokens")
        if form == "text":
            field = "text"
            if not request.text:
                raise InvalidRequestError(field, "is empty")
            self._check_size(field, len(request.text.encode()))
            token_ids = self._tokenizer.encode_text(request.text)
        elif form == "chat":
            field = "chat.messages"
            token_ids = self._tokenizer.encode_chat(self._messages(request.chat))
        else:
            field = "tokens.token_ids"
            token_ids = list(request.tokens.token_ids)
            for index, token_id in enumerate(token_ids):
                token_in_vocabulary(f"{field}[{index}]", token_id, model.vocab_size)
        if not token_ids:
            raise InvalidRequestError(field, "is empty")
        if len(token_ids) >= model.max_positions:
            raise InvalidRequestError(
                field,
                f"has {len(token_ids)} tokens; the model holds {model.max_positions} of prompt and completion together",
            )
        if form != "tokens" and max(token_ids) >= model.vocab_size:
            raise InvalidRequestError(field, "has a token that is outside the model's vocabulary")
        return tuple(token_ids)

    def _messages(self, chat: generation_pb2.ChatPrompt) -> list[dict[str, str]]:
        if not chat.messages:
            raise InvalidRequestError("chat.messages", "is empty")
        if len(chat.messages) > MAX_MESSAGES:
            raise InvalidRequestError("chat.messages", f"has more than {MAX_MESSAGES} turns")
        for index, message in enumerate(chat.messages):
            if message.role not in _ROLES:
                raise InvalidRequestError(
                    f"chat.messages[{index}].role", f"{message.role[:40]!r} is none of {', '.join(_ROLES)}"
                )
        if not any(message.content for message in chat.messages):
            raise InvalidRequestError("chat.messages", "has no content")
        self._check_size("chat.messages", sum(len(message.content.encode()) for message in chat.messages))
        return [{"role": message.role, "content": message.content} for message in chat.messages]

    def _check_size(self, field: str, num_bytes: int) -> None:
        if num_bytes > self._max_prompt_bytes:
            raise InvalidRequestError(field, f"has {num_bytes} bytes, more than {self._max_prompt_bytes}")


def check_sampling(sampling: sampling_pb2.SamplingParams, vocab_size: int) -> sampling_pb2.SamplingParams:
    """Checks sampling parameters and fills in every default; draws a seed where there is none.

    Raises:
        InvalidRequestError: naming the field, such as ``sampling.top_p``.
    """
    temperature = sampling.temperature  # the defaults of absent fields are 0, except for top_p
    top_p = sampling.top_p if sampling.HasField("top_p") else 1.0
    in_range("sampling.temperature", temperature, 0.0, MAX_TEMPERATURE)
    in_range("sampling.top_k", sampling.top_k, 0, vocab_size)
    in_range("sampling.top_p", top_p, 0.0, 1.0)
    if top_p == 0:
        raise InvalidRequestError("sampling.top_p", "must be above 0")
    in_range("sampling.min_p", sampling.min_p, 0.0, 1.0)
    check_rules(sampling, vocab_size)
    checked = sampling_pb2.SamplingParams()
    checked.CopyFrom(sampling)
    checked.temperature = temperature
    checked.top_k = sampling.top_k
    checked.top_p = top_p
    checked.min_p = sampling.min_p
    checked.seed = sampling.seed if sampling.HasField("seed") else secrets.randbits(_DRAWN_SEED_BITS)
    checked.mode = _check_mode(sampling.mode, is_greedy=temperature == 0)
    sampling_params(checked)  # whatever the verifier would refuse is refused here
    return checked


def check_num_choices(request: generation_pb2.GenerateRequest) -> int:
    """Completions asked for.

    Raises:
        InvalidRequestError: naming the field.
    """
    num_choices = request.n if request.HasField("n") else 1
    in_range("n", num_choices, 1, MAX_CHOICES)
    return num_choices


def _check_mode(mode: sampling_pb2.VerifyMode, *, is_greedy: bool) -> sampling_pb2.VerifyMode:
    if mode not in sampling_pb2.VerifyMode.values():
        raise InvalidRequestError("sampling.mode", f"{int(mode)} is not a verification mode")
    if mode == sampling_pb2.VERIFY_MODE_UNSPECIFIED:
        return sampling_pb2.VERIFY_MODE_GREEDY if is_greedy else sampling_pb2.VERIFY_MODE_COUPLED
    if mode == sampling_pb2.VERIFY_MODE_GREEDY and not is_greedy:
        raise InvalidRequestError("sampling.mode", "greedy needs temperature 0")
    if mode != sampling_pb2.VERIFY_MODE_GREEDY and is_greedy:
        raise InvalidRequestError("sampling.mode", "only greedy is possible at temperature 0")
    return mode


def check_stop(
    conditions: Sequence[sampling_pb2.StopCondition], vocab_size: int
) -> tuple[frozenset[int], tuple[str, ...]]:
    """Checks stop conditions and sorts them into token ids and texts.

    Raises:
        InvalidRequestError: naming the field, such as ``stop[0].type``.
    """
    if len(conditions) > MAX_STOP_CONDITIONS:
        raise InvalidRequestError(
            "stop", f"has {len(conditions)} conditions, at most {MAX_STOP_CONDITIONS} are possible"
        )
    token_ids: set[int] = set()
    texts: list[str] = []
    for index, condition in enumerate(conditions):
        if condition.type == sampling_pb2.STOP_TYPE_TOKEN:
            token_in_vocabulary(f"stop[{index}].token_id", condition.token_id, vocab_size)
            if condition.text:
                raise InvalidRequestError(
                    f"stop[{index}].text", "is not compared by a condition of type token"
                )
            token_ids.add(condition.token_id)
        elif condition.type == sampling_pb2.STOP_TYPE_TEXT:
            num_bytes = len(condition.text.encode())
            if not 1 <= num_bytes <= MAX_STOP_TEXT_BYTES:
                raise InvalidRequestError(
                    f"stop[{index}].text", f"has {num_bytes} bytes, not 1 to {MAX_STOP_TEXT_BYTES}"
                )
            if condition.token_id:
                raise InvalidRequestError(
                    f"stop[{index}].token_id", "is not compared by a condition of type text"
                )
            texts.append(condition.text)
        else:
            raise InvalidRequestError(
                f"stop[{index}].type", f"{int(condition.type)} is neither token nor text"
            )
    return frozenset(token_ids), tuple(texts)
