"""The error for a constraint that cannot be enforced."""

from __future__ import annotations

from paceline.contract.errors import InvalidRequestError
from paceline.sampling.params import ConstraintKind

_MAX_MESSAGE_CHARACTERS = 300


class ConstraintError(InvalidRequestError):
    """A constraint is wrong, unsupported, or too expensive. ``field`` names its form."""

    def __init__(self, kind: ConstraintKind, description: str) -> None:
        super().__init__(f"constraint.{kind}", shortened(description))


def shortened(text: str) -> str:
    """A text on one line, cut in the middle if it quotes a whole grammar: short enough for a status."""
    line = " ".join(text.split())
    if len(line) <= _MAX_MESSAGE_CHARACTERS:
        return line
    half = _MAX_MESSAGE_CHARACTERS // 2
    return f"{line[:half]} ... {line[-half:]}"
