"""One frame of measurements from the wire, checked and turned into a delta.

Responsible for: range checks that name the field. Deliberately does not know: subjects, Redis, policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from paceline.contract.errors import InvalidRequestError
from paceline.contract.fields import check_tenant
from paceline.contract.limits import (
    MAX_CONTEXT_TOKENS,
    MAX_DRAFT_LENGTH,
    MAX_LABEL_CHARACTERS,
    MAX_MEASURED_US,
    MAX_PEER_PAIRS,
    MAX_REPORT_ITEMS,
    MAX_REPORTED_DRAFTERS,
    MAX_TENANTS,
)
from paceline.scheduling.reliability import Reliability
from paceline.scheduling.speed import TimedPass
from paceline.v1 import scheduler_pb2
from services.scheduler.draft_acceptance import DrafterAcceptance
from services.scheduler.measurements import (
    AcceptancePart,
    CurvePart,
    DraftAcceptancePart,
    DraftTimePart,
    Measurements,
    NetworkPart,
    TenantsPart,
)
from services.scheduler.network import Pair
from services.scheduler.tenants import Use

_MAX_ROWS = 1 << 20
_MAX_TRIALS = 1 << 24
MAX_MEASURED_USE = 1 << 48


def measurements_of(request: scheduler_pb2.ReportRequest, at_ms: int = 0) -> Measurements:
    """The measurements of one frame. Steps and drafts of 0 microseconds were too short to time and are left out.

    Args:
        request: the frame.
        at_ms: when it arrived, unix milliseconds.

    Raises:
        InvalidRequestError: names the field.
    """
    for field in ("steps", "drafts", "round_trips_us", "queues_us"):
        if len(getattr(request, field)) > MAX_REPORT_ITEMS:
            raise InvalidRequestError(field, f"at most {MAX_REPORT_ITEMS} in one frame")
    for step in request.steps:
        _check("steps.num_rows", step.num_rows, 1, _MAX_ROWS)
        _check("steps.num_sequences", step.num_sequences, 1, step.num_rows)
        _check("steps.num_context_tokens", step.num_context_tokens, 0, MAX_CONTEXT_TOKENS)
        _check("steps.step_us", step.step_us, 0, MAX_MEASURED_US)
    for draft in request.drafts:
        _check("drafts.num_draft_steps", draft.num_draft_steps, 1, 4096)
        _check("drafts.num_sequences", draft.num_sequences, 1, _MAX_ROWS)
        _check("drafts.draft_us", draft.draft_us, 0, MAX_MEASURED_US)
    for field in ("round_trips_us", "queues_us"):
        for duration_us in getattr(request, field):
            _check(field, duration_us, 0, MAX_MEASURED_US)
    drafted = tuple(request.drafted_per_position)
    accepted = tuple(request.accepted_per_position)
    accepted += (0,) * (len(drafted) - len(accepted))  # where no pass got that far, the count may be left out
    _check_positions(drafted, accepted)
    _check("num_running_sequences", request.num_running_sequences, 0, _MAX_ROWS)
    _check("longest_draft", request.longest_draft, 0, _MAX_ROWS)
    steps = [
        (step.num_rows, step.step_us, step.num_sequences, step.num_context_tokens)
        for step in request.steps
        if step.step_us
    ]
    return Measurements(
        CurvePart.of(steps, max(at_ms - len(steps), 0)),
        AcceptancePart.of(drafted, accepted),
        DraftTimePart.of(
            (draft.num_draft_steps, draft.draft_us, draft.num_sequences)
            for draft in request.drafts
            if draft.draft_us
        ),
        _network_of(request),
        _acceptance_of(request),
        _tenants_of(request),
    )


def passes_of(request: scheduler_pb2.ReportRequest) -> list[TimedPass]:
    """The steps of a frame in which every sequence decoded; call it after `measurements_of` has checked the frame.

    Raises:
        InvalidRequestError: names the field.
    """
    passes = []
    for step in request.steps:
        if not (step.num_tokens and step.step_us):
            continue
        _check("steps.num_tokens", step.num_tokens, 0, _MAX_ROWS)
        _check("steps.num_cache_hits", step.num_cache_hits, 0, step.num_sequences)
        _check("steps.wait_us", step.wait_us, 0, MAX_MEASURED_US)
        _check("steps.other_us", step.other_us, 0, MAX_MEASURED_US)
        passes.append(
            TimedPass(
                policy_version=step.policy_version,
                num_rows=step.num_rows,
                num_sequences=step.num_sequences,
                num_tokens=step.num_tokens,
                num_cache_hits=step.num_cache_hits,
                may_draft=step.may_draft,
                step_s=step.step_us * 1e-6,
                wait_s=step.wait_us * 1e-6,
                other_s=step.other_us * 1e-6,
            )
        )
    return passes


def _network_of(request: scheduler_pb2.ReportRequest) -> NetworkPart:
    """Round trips and waits, by pair of peers where the frame names them."""
    if len(request.peers) > MAX_PEER_PAIRS:
        raise InvalidRequestError("peers", f"at most {MAX_PEER_PAIRS}")
    pairs: list[Pair] = []
    for peer in request.peers:
        for field in ("conductor", "drafter"):
            _check_name(f"peers.{field}", getattr(peer, field))
        pairs.append((peer.conductor, peer.drafter))
    round_trips = _by_pair("round_trip_peers", request.round_trips_us, request.round_trip_peers, pairs)
    queues = _by_pair("queue_peers", request.queues_us, request.queue_peers, pairs)
    part = NetworkPart()
    for pair in dict.fromkeys((*round_trips, *queues)):
        part = part.merged(NetworkPart.of(round_trips.get(pair, ()), queues.get(pair, ()), pair))
    return part


def _by_pair(
    field: str, durations_us: Sequence[int], indices: Sequence[int], pairs: Sequence[Pair]
) -> dict[Pair, list[int]]:
    if indices and len(indices) != len(durations_us):
        raise InvalidRequestError(field, f"{len(indices)} pairs for {len(durations_us)} durations")
    by_pair: dict[Pair, list[int]] = {}
    for index, duration_us in enumerate(durations_us):
        pair = ("", "")
        if indices:
            _check(field, indices[index], 0, len(pairs) - 1)
            pair = pairs[indices[index]]
        by_pair.setdefault(pair, []).append(duration_us)
    return by_pair


def _acceptance_of(request: scheduler_pb2.ReportRequest) -> DraftAcceptancePart:
    """Trials and acceptances by drafter."""
    if len(request.acceptance) > MAX_REPORTED_DRAFTERS:
        raise InvalidRequestError("acceptance", f"at most {MAX_REPORTED_DRAFTERS} drafters")
    part = DraftAcceptancePart()
    for outcome in request.acceptance:
        _check_name("acceptance.drafter", outcome.drafter)
        own = _table(
            "acceptance.cells", MAX_DRAFT_LENGTH * 256, outcome.cells, outcome.trials, outcome.accepted
        )
        calibrated = _table(
            "acceptance.calibrated",
            256,
            outcome.calibrated,
            outcome.calibrated_trials,
            outcome.calibrated_accepted,
        )
        part = part.merged(DraftAcceptancePart({outcome.drafter: DrafterAcceptance(own, calibrated)}))
    return part


def _tenants_of(request: scheduler_pb2.ReportRequest) -> TenantsPart:
    """Use by tenant."""
    if len(request.tenants) > MAX_TENANTS + 1:
        raise InvalidRequestError("tenants", f"at most {MAX_TENANTS + 1}")
    tenants: dict[str, Use] = {}
    for use in request.tenants:
        if not check_tenant("tenants.tenant", use.tenant):
            raise InvalidRequestError("tenants.tenant", "is missing")
        _check("tenants.num_tokens", use.num_tokens, 0, MAX_MEASURED_USE)
        _check("tenants.num_draft_tokens", use.num_draft_tokens, 0, MAX_MEASURED_USE)
        _check("tenants.num_accepted_tokens", use.num_accepted_tokens, 0, use.num_draft_tokens)
        _check("tenants.decode_us", use.decode_us, 0, MAX_MEASURED_USE)
        tenants[use.tenant] = Use(
            use.num_requests, use.num_tokens, use.num_draft_tokens, use.num_accepted_tokens, use.decode_us
        )
    return TenantsPart(tenants)


def _table(
    field: str, num_cells: int, cells: Sequence[int], trials: Sequence[int], accepted: Sequence[int]
) -> Reliability:
    if not len(cells) == len(trials) == len(accepted) <= MAX_REPORT_ITEMS:
        raise InvalidRequestError(field, f"arrays must agree, with at most {MAX_REPORT_ITEMS} cells")
    for cell, num_trials, num_accepted in zip(cells, trials, accepted, strict=True):
        _check(field, cell, 0, num_cells - 1)
        _check(f"{field}: trials", num_trials, 0, _MAX_TRIALS)
        _check(f"{field}: accepted", num_accepted, 0, num_trials)
    return Reliability.of(
        (cell >> 8, (cell & 255) / 255, num_trials, num_accepted)
        for cell, num_trials, num_accepted in zip(cells, trials, accepted, strict=True)
    )


def _check_positions(drafted: Sequence[int], accepted: Sequence[int]) -> None:
    if len(drafted) != len(accepted):
        raise InvalidRequestError("accepted_per_position", "is longer than drafted_per_position")
    if len(drafted) > MAX_DRAFT_LENGTH:
        raise InvalidRequestError("drafted_per_position", f"at most {MAX_DRAFT_LENGTH} positions")
    for field, counts in (("drafted_per_position", drafted), ("accepted_per_position", accepted)):
        if any(later > earlier for earlier, later in pairwise(counts)):
            raise InvalidRequestError(field, "rises with the position")
    if any(hits > trials for hits, trials in zip(accepted, drafted, strict=True)):
        raise InvalidRequestError("accepted_per_position", "above drafted_per_position")


def _check_name(field: str, value: str) -> None:
    if len(value) > MAX_LABEL_CHARACTERS or not (value.isprintable() or not value):
        raise InvalidRequestError(field, f"is longer than {MAX_LABEL_CHARACTERS} or not printable")


def _check(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequestError(field, f"must lie from {low} to {high}, got {value}")
