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


class VerifyMode(StrEnum):
    """How drafted tokens are held against the target. All of these are exact."""

    GREEDY = "greedy"
    """The target's most likely token, always."""
    COUPLED = "coupled"
    """Gumbel-max with noise shared by drafter and target: the text depends on seed and target alone."""
    REJECTION = "rejection"
    """Chain rejection sampling: exact in distribution, needs the distribution each token was drawn from."""


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
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    mode: VerifyMode | None = None

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
