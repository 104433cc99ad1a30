"""How likely a drafted token is accepted, per position in the draft.

Responsible for: decayed counts, their posterior rates, and the products that the planner needs.

Deliberately does not know: tokens, confidences of single tokens, sequences, storage.

Called by: the scheduler service, which collects and stores the counts and passes the rates to the planner.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

SCHEMA_VERSION = 1
_PRIOR_WEIGHT = 4.0  # rounds that the prior is worth


class AcceptanceEstimator:
    """Conditional acceptance per position: P(token j accepted | all before it accepted).

    Each rate is a posterior mean with a Beta prior, so that a few rounds cannot move it to 0 or 1. The prior of
    the first position is ``prior_rate``; the prior of any other position is the rate of the position before it.

    Args:
        max_positions: deepest position counted.
        half_life: rounds after which an old round counts half.
        prior_rate: expected rate of the first position before anything is known.
    """

    def __init__(
        self,
        max_positions: int = 16,
        half_life: float = 256.0,
        prior_rate: float = 0.6,
    ) -> None:
        if max_positions < 1 or not half_life > 0 or not 0 < prior_rate < 1:
            raise ValueError(
                "max_positions must be at least 1, half_life above 0, prior_rate between 0 and 1"
            )
        self._attempts = [0.0] * max_positions
        self._accepts = [0.0] * max_positions
        self._decay = 2.0 ** (-1.0 / half_life)
        self._prior_rate = prior_rate

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Add one verified path: of ``num_drafted`` tokens the first ``num_accepted`` were accepted."""
        if not 0 <= num_accepted <= num_drafted:
            raise ValueError(f"{num_accepted} accepted of {num_drafted} drafted")
        # Only a position whose predecessors were all accepted is a trial.
        for position in range(min(num_drafted, num_accepted + 1, len(self._attempts))):
            self._attempts[position] = self._attempts[position] * self._decay + 1.0
            accepted = 1.0 if position < num_accepted else 0.0
            self._accepts[position] = self._accepts[position] * self._decay + accepted

    def rates(self, length: int) -> tuple[float, ...]:
        """Conditional acceptance of positions 0..length-1."""
        rates: list[float] = []
        guess = self._prior_rate
        for position in range(length):
            if position < len(self._attempts):
                attempts, accepts = self._attempts[position], self._accepts[position]
                guess = (accepts + _PRIOR_WEIGHT * guess) / (attempts + _PRIOR_WEIGHT)
            rates.append(guess)
        return tuple(rates)

    def path_acceptances(self, length: int) -> tuple[float, ...]:
        """P(position j and all before it accepted), for j in 0..length-1."""
        path_acceptances: list[float] = []
        path_acceptance = 1.0
        for rate in self.rates(length):
            path_acceptance *= rate
            path_acceptances.append(path_acceptance)
        return tuple(path_acceptances)

    def to_dict(self) -> dict[str, Any]:
        """A JSON value."""
        return {
            "schema_version": SCHEMA_VERSION,
            "attempts": list(self._attempts),
            "accepts": list(self._accepts),
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any], half_life: float = 256.0) -> AcceptanceEstimator:
        """Read `to_dict`'s value back.

        Raises:
            ValueError: another schema version, or counts that are out of range.
        """
        if value.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(
                f"acceptance has schema version {value.get('schema_version')!r}, expected {SCHEMA_VERSION}"
            )
        attempts = [float(count) for count in value["attempts"]]
        accepts = [float(count) for count in value["accepts"]]
        plausible = len(attempts) == len(accepts) > 0 and all(
            math.isfinite(trials) and 0 <= hits <= trials
            for trials, hits in zip(attempts, accepts, strict=True)
        )
        if not plausible:
            raise ValueError("acceptance counts must be finite, and accepts not above attempts")
        estimator = cls(len(attempts), half_life)
        estimator._attempts, estimator._accepts = attempts, accepts
        return estimator
