"""Acceptance samples, counted by drafter until they are reported.

Responsible for: which draft tokens were accepted, by position and stated probability, as the scheduler's calibration
reads it. Deliberately does not know: sequences, streams. Filled by orchestrator.step_handler, emptied by
orchestrator.reports.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from paceline.contract.limits import MAX_REPORT_ITEMS, MAX_REPORTED_DRAFTERS
from paceline.v1 import peer_pb2, scheduler_pb2

Counts = defaultdict[int, list[int]]
"""[trials, accepted] by cell."""


def drafter_label(info: peer_pb2.PeerInfo) -> str:
    """A name that a drafter keeps over restarts: its method, and the fingerprint of its tap where it has one."""
    fingerprint = info.tap.projection_fingerprint[:12]
    return f"{info.method}/{fingerprint}" if fingerprint else info.method


class AcceptanceCounter:
    """Counts since the last frame; bounded.

    Attributes:
        num_dropped: samples that exceeded the bounds.
    """

    def __init__(self) -> None:
        self.num_dropped = 0
        self._drafters: dict[str, tuple[Counts, Counts]] = {}

    def __bool__(self) -> bool:
        return bool(self._drafters)

    def add(self, drafter: str, samples: Iterable[int]) -> None:
        """Counts the packed acceptance samples of one drafter's tokens."""
        tables = self._drafters.get(drafter)
        for sample in samples:
            if tables is None:
                if len(self._drafters) == MAX_REPORTED_DRAFTERS:
                    self.num_dropped += 1
                    continue
                tables = self._drafters[drafter] = (_counts(), _counts())
            own, calibrated = tables
            cell = sample >> 9
            if cell not in own and len(own) == MAX_REPORT_ITEMS:
                self.num_dropped += 1
                continue
            for counts, index in ((own, cell), (calibrated, sample >> 1 & 255)):
                count = counts[index]
                count[0] += 1
                count[1] += sample & 1

    def take(self) -> list[scheduler_pb2.AcceptanceCounts]:
        """All counts since the last call, one message for each drafter."""
        taken = [
            scheduler_pb2.AcceptanceCounts(
                drafter=drafter,
                cells=own.keys(),
                trials=[trials for trials, _ in own.values()],
                accepted=[accepted for _, accepted in own.values()],
                calibrated=calibrated.keys(),
                calibrated_trials=[trials for trials, _ in calibrated.values()],
                calibrated_accepted=[accepted for _, accepted in calibrated.values()],
            )
            for drafter, (own, calibrated) in self._drafters.items()
        ]
        self._drafters = {}
        return taken


def _counts() -> Counts:
    return defaultdict(lambda: [0, 0])
