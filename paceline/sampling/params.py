"""What a request may ask of sampling, checked once, at the edge.

Responsible for: ranges, and an error that names the field, so that an edge can answer INVALID_ARGUMENT with
it.

Deliberately does not know: tensors, logits, transports.

Called by: the gateway (to refuse), the verifier (to refuse again) and everything that samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

MAX_SEED = 2**64 - 1
MAX_TOP_K = 2**31 - 1
MAX_TOKEN_ID = 2**31 - 1
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 10.0
MAX_BIAS = 100.0
MAX_BIASES = 1024
MAX_BAD_RUNS = 256
MAX_BAD_RUN_TOKENS = 32
MAX_CONSTRAINT_BYTES = 1 << 16
MAX_CHOICES = 1024
MAX_TOP_LOG_PROBS = 20


class VerifyMode(StrEnum):
    """How drafted tokens are held against the target. All but typical are exact."""

    GREEDY = "greedy"
    """The target's most likely token, always."""
    COUPLED = "coupled"
    """Gumbel-max with noise shared by drafter and target: the text depends on seed and target alone."""
    REJECTION = "rejection"
    """Rejection sampling on chains and trees: exact in distribution, needs what each token was drawn from."""
    BLOCK = "block"
    """Block verification of chains: exact in distribution, needs the whole distribution at every position."""
    TYPICAL = "typical"
    """Typical acceptance: not exact. Only where a request names it."""

    @property
    def is_exact(self) -> bool:
        """Whether the text has the target's distribution."""
        return self is not VerifyMode.TYPICAL

    @property
    def verifies_draws(self) -> bool:
        """Whether it matters what a drafted token was drawn from."""
        return self in (VerifyMode.REJECTION, VerifyMode.BLOCK)

    @property
    def needs(self) -> str:
        """What a drafter sends, for people."""
        if self is VerifyMode.REJECTION:
            return "token ids; for drawn ones the distribution that siblings were drawn from"
        if self is VerifyMode.BLOCK:
            return "token ids; for drawn ones the distribution at every position"
        return "token ids"


class ConstraintKind(StrEnum):
    """What describes the language that a completion must belong to."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"
    JSON_OBJECT = "json_object"


@dataclass(frozen=True, slots=True)
class Constraint:
    """A formal language for a whole completion.

    Attributes:
        kind: how it is described.
        text: the schema, expression or grammar; empty for choices and for any JSON object.
        choices: the texts to choose from; empty but for choices.
    """

    kind: ConstraintKind
    text: str = ""
    choices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        field = f"constraint.{self.kind}"
        if self.kind is ConstraintKind.CHOICE:
            if not 1 <= len(self.choices) <= MAX_CHOICES or not all(self.choices):
                raise ParameterError(field, f"must have 1 to {MAX_CHOICES} texts, none of them empty")
        elif self.kind is not ConstraintKind.JSON_OBJECT and not self.text:
            raise ParameterError(field, "must not be empty")
        num_bytes = len(self.text.encode()) + sum(len(choice.encode()) for choice in self.choices)
        if num_bytes > MAX_CONSTRAINT_BYTES:
            raise ParameterError(field, f"has {num_bytes} bytes, at most {MAX_CONSTRAINT_BYTES} are possible")


class ParameterError(ValueError):
    """A sampling parameter that cannot be honoured. ``field`` is the parameter's name."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field} {message}")
        self.field = field
        self.message = message


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request.

    Attributes:
        temperature: 0 means greedy.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose mass reaches this; 1 keeps all.
        min_p: drop tokens less likely than this times the most likely one; 0 keeps all.
        seed: keys all noise, an unsigned 64-bit number. Two requests with one seed and one prompt get one
            text.
        mode: None picks greedy at temperature 0 and coupled above.
        repetition_penalty: divides positive and multiplies negative logits of tokens that stand in prompt or
            completion; 1 changes nothing.
        presence_penalty: taken from the logit of each token that the completion has.
        frequency_penalty: taken from a token's logit once for each time that the completion has it.
        logit_bias: (token id, number added to its logit); each id once.
        bad_runs: runs of tokens that never stand in the completion.
        min_tokens: no stop token before so many tokens.
        typical_epsilon: typical mode accepts above min(typical_epsilon, typical_delta * exp(-entropy)).
        typical_delta: see there.
        constraint: what the completion must look like; None leaves it free.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    mode: VerifyMode | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_runs: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    typical_epsilon: float = 0.09
    typical_delta: float = 0.3
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature)
        if self.temperature < 0:
            raise ParameterError("temperature", f"must be 0 or more, got {self.temperature!r}")
        _check_integer("top_k", self.top_k, MAX_TOP_K)
        _check_number("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise ParameterError("top_p", f"must be above 0 and at most 1, got {self.top_p!r}")
        _check_number("min_p", self.min_p)
        if not 0 <= self.min_p <= 1:
            raise ParameterError("min_p", f"must be between 0 and 1, got {self.min_p!r}")
        _check_integer("seed", self.seed, MAX_SEED)
        if self.mode is not None and not isinstance(self.mode, VerifyMode):
            raise ParameterError(
                "mode", f"must be one of {[mode.value for mode in VerifyMode]}, got {self.mode!r}"
            )
        if self.mode is VerifyMode.GREEDY and not self.is_greedy:
            raise ParameterError(
                "mode", f"greedy contradicts temperature {self.temperature!r}; send temperature 0"
            )
        self._check_rules()
        for field in ("typical_epsilon", "typical_delta"):
            value = getattr(self, field)
            _check_number(field, value)
            if not 0 < value <= 1:
                raise ParameterError(field, f"must be above 0 and at most 1, got {value!r}")

    def _check_rules(self) -> None:
        _check_number("repetition_penalty", self.repetition_penalty)
        if not 0 < self.repetition_penalty <= MAX_REPETITION_PENALTY:
            raise ParameterError(
                "repetition_penalty",
                f"must be above 0 and at most {MAX_REPETITION_PENALTY}, got {self.repetition_penalty!r}",
            )
        for field in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, field)
            _check_number(field, value)
            if not -MAX_PENALTY <= value <= MAX_PENALTY:
                raise ParameterError(
                    field, f"must be between {-MAX_PENALTY} and {MAX_PENALTY}, got {value!r}"
                )
        if len(self.logit_bias) > MAX_BIASES or len({token for token, _ in self.logit_bias}) < len(
            self.logit_bias
        ):
            raise ParameterError("logit_bias", f"must have at most {MAX_BIASES} token ids, each once")
        for token, bias in self.logit_bias:
            _check_integer("logit_bias", token, MAX_TOKEN_ID)
            _check_number("logit_bias", bias)
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                raise ParameterError(
                    "logit_bias", f"must be between {-MAX_BIAS} and {MAX_BIAS}, got {bias!r} for {token}"
                )
        if len(self.bad_runs) > MAX_BAD_RUNS or any(
            not 1 <= len(run) <= MAX_BAD_RUN_TOKENS for run in self.bad_runs
        ):
            raise ParameterError(
                "bad_runs", f"must be at most {MAX_BAD_RUNS} runs of 1 to {MAX_BAD_RUN_TOKENS} tokens"
            )
        for run in self.bad_runs:
            for token in run:
                _check_integer("bad_runs", token, MAX_TOKEN_ID)
        _check_integer("min_tokens", self.min_tokens, MAX_TOKEN_ID)

    @property
    def has_rules(self) -> bool:
        """Whether logits are changed before temperature and filters, depending on the text before them."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.bad_runs
            or self.min_tokens
            or self.constraint
        )

    @property
    def is_greedy(self) -> bool:
        """Whether the request wants the most likely token at every position."""
        return self.temperature == 0

    @property
    def resolved_mode(self) -> VerifyMode:
        """The mode that applies: at temperature 0 every exact mode is greedy."""
        if self.is_greedy:
            return VerifyMode.GREEDY
        return self.mode or VerifyMode.COUPLED


def _check_number(field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ParameterError(field, f"must be a number, got {value!r}")
    if not math.isfinite(value):
        raise ParameterError(field, f"must be finite, got {value!r}")


def _check_integer(field: str, value: object, largest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParameterError(field, f"must be an integer, got {value!r}")
    if not 0 <= value <= largest:
        raise ParameterError(field, f"must be between 0 and {largest}, got {value!r}")
