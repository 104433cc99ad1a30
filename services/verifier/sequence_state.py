"""The states of a sequence at the verifier, the legal transitions between them, and why a sequence ends."""

from __future__ import annotations

from enum import Enum


class TargetSequenceState(Enum):
    """Whether a sequence runs; TRANSITIONS lists the legal changes."""

    WAITING = "waiting"
    """It has no KV slot: it was just opened, or gave its slot to older sequences."""
    RUNNING = "running"
    """It takes part in steps."""
    FINISHED = "finished"
    """It ended, for whatever reason."""


TRANSITIONS: dict[TargetSequenceState, frozenset[TargetSequenceState]] = {
    TargetSequenceState.WAITING: frozenset({TargetSequenceState.RUNNING, TargetSequenceState.FINISHED}),
    TargetSequenceState.RUNNING: frozenset({TargetSequenceState.WAITING, TargetSequenceState.FINISHED}),
    TargetSequenceState.FINISHED: frozenset(),
}


class Finish(Enum):
    """Why a sequence ended; the values are names of paceline.v1.FinishReason."""

    NOT_YET = "FINISH_REASON_UNSPECIFIED"
    STOP = "FINISH_REASON_STOP"
    LENGTH = "FINISH_REASON_LENGTH"
