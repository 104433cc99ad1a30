"""What a dialled drafter can be set to, and the file that changes it while it runs.

Responsible for: the dials, their ranges, and reading them. Deliberately does not know: drafts. Read by
experiments.dials.drafter; written by experiments.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from paceline.contract.errors import InvalidRequestError


class Confidence(StrEnum):
    """What the log-probabilities that the drafter sends are worth."""

    CALIBRATED = "calibrated"
    """The chance that the token is right, position by position."""
    FLAT = "flat"
    """The mean chance, whatever the position."""
    INVERTED = "inverted"
    """The chance that it is wrong: likely positions look unlikely."""
    NOISY = "noisy"
    """Any number between 0 and 1: it says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dials:
    """Settings of a dialled drafter.

    Attributes:
        acceptance: chance that a drafted token is the target's, 0 to 1, at each position by itself.
        spread: how far positions differ, 0 to 1: half of them have the mean chance plus `spread` times what is left to
            the nearer end of the scale, half that much less. The mean stays.
        draft_ms: time of one token in a row, milliseconds.
        draft_base_ms: time of one call, whatever its size, milliseconds.
        is_parallel: a call costs one token's time, however many tokens in a row it makes (block drafters).
        lane_cost: what each further row (a sequence or an outcome) drafted together with another adds to the time of a
            token, as a share of it; 0: rows are free, 1: as if one after the other.
        bonus_hit_rate: chance that the token which replaces a wrong one is among the alternatives for its place.
        num_alternatives: alternatives for each place, equally likely to be it.
        confidence: worth of the log-probabilities sent.
        seed: of the luck; the same seed, text and position give the same luck at any time.
    """

    acceptance: float = 0.8
    spread: float = 0.0
    draft_ms: float = 1.5
    draft_base_ms: float = 0.0
    is_parallel: bool = False
    lane_cost: float = 0.0
    bonus_hit_rate: float = 0.8
    num_alternatives: int = 1
    confidence: Confidence = Confidence.CALIBRATED
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("acceptance", "spread", "lane_cost", "bonus_hit_rate"):
            _check(name, getattr(self, name), 1.0)
        for name in ("draft_ms", "draft_base_ms"):
            _check(name, getattr(self, name), 10_000.0)
        for name, least in (("num_alternatives", 1), ("seed", 0)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value < 1 << 32:
                raise InvalidRequestError(name, f"must be a whole number of at least {least}, got {value!r}")
        if type(self.is_parallel) is not bool:
            raise InvalidRequestError("is_parallel", f"must be true or false, got {self.is_parallel!r}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Dials:
        """Dials from plain values; what is left out keeps its default.

        Raises:
            InvalidRequestError: a name is unknown or a value out of range.
        """
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise InvalidRequestError(unknown[0], f"no such dial; there are {', '.join(sorted(known))}")
        given = dict(values)
        if "confidence" in given:
            try:
                given["confidence"] = Confidence(given["confidence"])
            except ValueError:
                raise InvalidRequestError("confidence", f"must be one of {', '.join(Confidence)}") from None
        return cls(**given)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as `from_dict` reads them."""
        return asdict(self)

    def draft_s(self, num_tokens: int, num_rows: int) -> float:
        """Seconds that `num_rows` rows of `num_tokens` tokens in a row take together; nothing costs nothing."""
        if num_tokens <= 0 or num_rows <= 0:
            return 0.0
        steps = 1 if self.is_parallel else num_tokens
        return (self.draft_base_ms + self.draft_ms * steps * (1 + self.lane_cost * (num_rows - 1))) * 1e-3


def fixed(dials: Dials) -> Callable[[], Dials]:
    """Dials that stay as they are."""
    return lambda: dials


class DialFile:
    """Dials in a JSON file, read again whenever it was replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._dials = Dials()
        self()

    def __call__(self) -> Dials:
        """The dials in force.

        Raises:
            InvalidRequestError: the file holds something else.
            OSError: it cannot be read.
        """
        status = self._path.stat()
        stamp = (status.st_mtime_ns, status.st_ino)
        if stamp != self._stamp:
            try:
                values = json.loads(self._path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise InvalidRequestError("dials", f"{self._path.name} is not JSON: {error}") from None
            if not isinstance(values, dict):
                raise InvalidRequestError("dials", f"{self._path.name} must hold an object")
            self._dials, self._stamp = Dials.from_dict(values), stamp
        return self._dials


def _check(name: str, value: object, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise InvalidRequestError(name, f"must be a number from 0 to {most:g}, got {value!r}")
