"""The sampling parameters of a request, checked when they are made.

Responsible for: the range of every parameter. An InvalidRequestError names the one that is out of range.

Deliberately does not know: tensors, logits, transports.

Called by: the gateway (to refuse), the verifier (to refuse again) and everything that samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from paceline.contract import limits
from paceline.contract.errors import InvalidRequestError
from paceline.contract.fields import check_count, check_integer, check_number


class VerifyMode(StrEnum):
    """How draft tokens are verified against the target. All modes but typical are exact."""

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
    def needs(self) -> str:
        """What a drafter must send, for people."""
        if self is VerifyMode.REJECTION:
            return "token ids; for drawn ones the distribution that siblings were drawn from"
        if self is VerifyMode.BLOCK:
            return "token ids; for drawn ones the distribution at every position"
        return "token ids"


class ConstraintKind(StrEnum):
    """The form in which a constraint describes the language of a completion."""

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
        choices: the texts to choose from; empty for the other kinds.
    """

    kind: ConstraintKind
    text: str = ""
    choices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        field = f"constraint.{self.kind}"
        if self.kind is ConstraintKind.CHOICE:
            most = limits.MAX_CONSTRAINT_CHOICES
            if not 1 <= len(self.choices) <= most or not all(self.choices):
                raise InvalidRequestError(field, f"must have 1 to {most} texts, none of them empty")
        elif self.kind is not ConstraintKind.JSON_OBJECT and not self.text:
            raise InvalidRequestError(field, "must not be empty")
        num_bytes = len(self.text.encode()) + sum(len(choice.encode()) for choice in self.choices)
        check_count(field, num_bytes, limits.MAX_CONSTRAINT_BYTES, "bytes")


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
            completion; 1 changes no logit.
        presence_penalty: subtracted from the logit of each token that the completion has.
        frequency_penalty: subtracted from a token's logit once for each time that the completion has the token.
        logit_bias: (token id, number added to its logit); each id once.
        bad_runs: runs of tokens that the completion must not contain.
        min_tokens: no stop token before so many tokens.
        typical_epsilon: typical mode accepts above min(typical_epsilon, typical_delta * exp(-entropy)).
        typical_delta: see `typical_epsilon`.
        constraint: the formal language of the completion; None allows any text.
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
    typical_epsilon: float = limits.DEFAULT_TYPICAL_EPSILON
    typical_delta: float = limits.DEFAULT_TYPICAL_DELTA
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, 0, math.inf)
        check_integer("top_k", self.top_k, 0, limits.MAX_TOP_K)
        check_number("top_p", self.top_p, 0, 1, is_low_allowed=False)
        check_number("min_p", self.min_p, 0, 1)
        check_integer("seed", self.seed, 0, limits.MAX_SEED)
        if self.mode is not None and not isinstance(self.mode, VerifyMode):
            raise InvalidRequestError(
                "mode", f"must be one of {[mode.value for mode in VerifyMode]}, got {self.mode!r}"
            )
        if self.mode is VerifyMode.GREEDY and not self.is_greedy:
            raise InvalidRequestError(
                "mode", f"greedy needs temperature 0, and the temperature is {self.temperature!r}"
            )
        self._check_rules()
        check_number("typical_epsilon", self.typical_epsilon, 0, 1, is_low_allowed=False)
        check_number("typical_delta", self.typical_delta, 0, 1, is_low_allowed=False)

    def _check_rules(self) -> None:
        most = limits.MAX_REPETITION_PENALTY
        check_number("repetition_penalty", self.repetition_penalty, 0, most, is_low_allowed=False)
        check_number("presence_penalty", self.presence_penalty, -limits.MAX_PENALTY, limits.MAX_PENALTY)
        check_number("frequency_penalty", self.frequency_penalty, -limits.MAX_PENALTY, limits.MAX_PENALTY)
        check_count("logit_bias", len(self.logit_bias), limits.MAX_BIASES, "entries")
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise InvalidRequestError("logit_bias", "must name each token once")
        for token, bias in self.logit_bias:
            check_integer(f"logit_bias[{token}]", token, 0, limits.MAX_TOKEN_ID)
            check_number(f"logit_bias[{token}]", bias, -limits.MAX_BIAS, limits.MAX_BIAS)
        check_count("bad_runs", len(self.bad_runs), limits.MAX_BAD_RUNS, "runs")
        for index, run in enumerate(self.bad_runs):
            field = f"bad_runs[{index}].token_ids"
            check_integer(field, len(run), 1, limits.MAX_BAD_RUN_TOKENS, "tokens")
            for position, token in enumerate(run):
                check_integer(f"{field}[{position}]", token, 0, limits.MAX_TOKEN_ID)
        check_integer("min_tokens", self.min_tokens, 0, limits.MAX_TOKEN_ID)

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
