"""The states of a request in the conductor, and the transitions between them that are legal."""

from __future__ import annotations

import enum


class ConductorSequenceState(enum.Enum):
    """How far a request is on its way through a verifier."""

    PENDING = "pending"
    """It waits for a verifier: it is new, or its verifier was lost."""
    OPENING = "opening"
    """OpenSequence was sent; the verifier has not answered."""
    RUNNING = "running"
    """The verifier has given it a sequence id."""
    FINISHED = "finished"
    """Its ending is in the output queue."""


TRANSITIONS: dict[ConductorSequenceState, frozenset[ConductorSequenceState]] = {
    ConductorSequenceState.PENDING: frozenset(
        {ConductorSequenceState.OPENING, ConductorSequenceState.FINISHED}
    ),
    ConductorSequenceState.OPENING: frozenset(
        {ConductorSequenceState.RUNNING, ConductorSequenceState.PENDING, ConductorSequenceState.FINISHED}
    ),
    ConductorSequenceState.RUNNING: frozenset(
        {ConductorSequenceState.PENDING, ConductorSequenceState.FINISHED}
    ),
    ConductorSequenceState.FINISHED: frozenset(),
}
