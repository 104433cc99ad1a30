"""One frame of measurements from the wire, checked and turned into a delta.

Responsible for: range checks that name the field. Deliberately does not know: subjects, Redis, policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from paceline.errors import InvalidRequestError
from paceline.v1 import scheduler_pb2
from services.scheduler.measurements import (
    MAX_POSITIONS,
    AcceptancePart,
    CurvePart,
    DraftTimePart,
    Measurements,
    NetworkPart,
)

MAX_SAMPLES_PER_FRAME = 4096
_MAX_US = 600_000_000
_MAX_ROWS = 1 << 20


def measurements_of(request: scheduler_pb2.ReportRequest) -> Measurements:
    """The measurements of one frame. Steps and drafts of 0 microseconds were too short to time and are left
    out.

    Raises:
        InvalidRequestError: names the field.
    """
    for field in ("steps", "drafts", "round_trips_us"):
        if len(getattr(request, field)) > MAX_SAMPLES_PER_FRAME:
            raise InvalidRequestError(field, f"at most {MAX_SAMPLES_PER_FRAME} in one frame")
    for step in request.steps:
        _check("steps.num_rows", step.num_rows, 1, _MAX_ROWS)
        _check("steps.num_sequences", step.num_sequences, 1, step.num_rows)
        _check("steps.step_us", step.step_us, 0, _MAX_US)
    for draft in request.drafts:
        _check("drafts.num_draft_steps", draft.num_draft_steps, 1, 4096)
        _check("drafts.num_sequences", draft.num_sequences, 1, _MAX_ROWS)
        _check("drafts.draft_us", draft.draft_us, 0, _MAX_US)
    for round_trip_us in request.round_trips_us:
        _check("round_trips_us", round_trip_us, 0, _MAX_US)
    drafted = tuple(request.drafted_per_position)
    accepted = tuple(request.accepted_per_position)
    accepted += (0,) * (len(drafted) - len(accepted))  # where no pass got that far, the count may be left out
    _check_positions(drafted, accepted)
    _check("num_running_sequences", request.num_running_sequences, 0, _MAX_ROWS)
    return Measurements(
        CurvePart.of((step.num_rows, step.step_us) for step in request.steps if step.step_us),
        AcceptancePart.of(drafted, accepted),
        DraftTimePart.of(
            (draft.num_draft_steps, draft.draft_us) for draft in request.drafts if draft.draft_us
        ),
        NetworkPart.of(request.round_trips_us),
    )


def _check_positions(drafted: Sequence[int], accepted: Sequence[int]) -> None:
    if len(drafted) != len(accepted):
        raise InvalidRequestError("accepted_per_position", "is longer than drafted_per_position")
    if len(drafted) > MAX_POSITIONS:
        raise InvalidRequestError("drafted_per_position", f"at most {MAX_POSITIONS} positions")
    for field, counts in (("drafted_per_position", drafted), ("accepted_per_position", accepted)):
        if any(later > earlier for earlier, later in pairwise(counts)):
            raise InvalidRequestError(field, "rises with the position")
    if any(hits > trials for hits, trials in zip(accepted, drafted, strict=True)):
        raise InvalidRequestError("accepted_per_position", "above drafted_per_position")


def _check(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequestError(field, f"must lie from {low} to {high}, got {value}")
