"""Which conductor gets a request, and what conductors report of themselves."""

from __future__ import annotations

from collections import Counter

import pytest

from orchestrator.admission import Admission
from orchestrator.counters import Counters, StatusCollector
from orchestrator.status import ConductorStatus
from paceline.contract.errors import (
    CapacityError,
    InvalidRequestError,
    UnavailableError,
)
from paceline.v1 import sampling_pb2
from tests.orchestrator.scripted_peers import peer_info


def status(
    verifier: str, num_running: int = 0, is_ready: bool = True, max_positions: int = 100
) -> ConductorStatus:
    info = peer_info("verifier", max_positions=max_positions)
    return ConductorStatus(
        endpoint=f"conductor-of-{verifier}",
        verifier_endpoint=verifier,
        is_ready=is_ready,
        is_draining=False,
        num_running=num_running,
        placement="none",
        verifier=info.SerializeToString(),
        reason="" if is_ready else "scripted",
        counters=Counters(num_requests=3, finished=Counter({sampling_pb2.FINISH_REASON_STOP: 2})).as_dict(),
    )


def test_admission_spreads_requests_also_between_two_statuses() -> None:
    admission = Admission(max_sequences=4)
    admission.update(status("a", 1))
    admission.update(status("b", 0))
    assigned = Counter(admission.assign(1, 1) for _ in range(7))
    assert assigned == {"conductor-of-a": 3, "conductor-of-b": 4}
    with pytest.raises(CapacityError):
        admission.assign(1, 1)
    admission.update(status("a", 0))
    assert admission.assign(1, 1) == "conductor-of-a"


def test_admission_refuses_what_no_verifier_can_hold() -> None:
    admission = Admission(max_sequences=4)
    admission.update(status("a", 0, max_positions=50))
    admission.update(status("b", 3, max_positions=80))
    assert admission.assign(40, 20) == "conductor-of-b"
    with pytest.raises(InvalidRequestError, match="80"):
        admission.assign(60, 40)
    with pytest.raises(InvalidRequestError, match="num_prompt_tokens"):
        admission.assign(0, 1)


def test_admission_without_a_ready_conductor_says_why() -> None:
    admission = Admission(max_sequences=4)
    with pytest.raises(UnavailableError, match="no conductor has reported"):
        admission.assign(1, 1)
    admission.update(status("a", is_ready=False))
    with pytest.raises(UnavailableError, match="a: scripted"):
        admission.assign(1, 1)
    admission.update(status("a"))
    admission.assign(1, 1)
    admission.lose("a")
    with pytest.raises(UnavailableError):
        admission.assign(1, 1)


def test_statuses_become_metrics() -> None:
    families = {family.name: family for family in StatusCollector(lambda: [status("a", 2)]).collect()}
    assert families["paceline:conductor_requests"].samples[0].value == 3
    assert families["paceline:conductor_running_sequences"].samples[0].value == 2
    finished = families["paceline:conductor_finished_requests"].samples[0]
    assert (finished.labels, finished.value) == ({"verifier": "a", "reason": "stop"}, 2)
