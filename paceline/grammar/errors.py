"""The error of a constraint that cannot be honoured, and messages short enough for a status."""

from __future__ import annotations

from paceline.sampling.params import ConstraintKind, ParameterError

_MAX_MESSAGE_CHARACTERS = 300


class ConstraintError(ParameterError):
    """A constraint that is wrong, not supported, or costs too much. ``field`` names its form."""

    def __init__(self, kind: ConstraintKind, message: str) -> None:
        super().__init__(f"constraint.{kind}", shortened(message))


def shortened(message: str) -> str:
    """A message on one line, cut where it quotes a whole grammar."""
    line = " ".join(message.split())
    if len(line) <= _MAX_MESSAGE_CHARACTERS:
        return line
    half = _MAX_MESSAGE_CHARACTERS // 2
    return f"{line[:half]} ... {line[-half:]}"
