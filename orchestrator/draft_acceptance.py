"""What became of drafted tokens, counted by drafter until it is reported.

Responsible for: checking and taking apart the packed outcomes of a step report, and the packed counts of a measurement
frame. Deliberately does not know: sequences, streams. Filled by orchestrator.cycles, emptied by orchestrator.reports.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from paceline.contract.errors import StreamProtocolError
from paceline.v1 import peer_pb2, scheduler_pb2, target_pb2

MAX_CELLS = 4096
MAX_DRAFTERS = 32
_NUM_BITS = 23  # position 6, own probability 8, calibrated probability 8, accepted 1

Counts = defaultdict[int, list[int]]
"""[trials, accepted] by cell."""


def drafter_label(info: peer_pb2.PeerInfo) -> str:
    """A name for a drafter that stays over restarts: its method, and the fingerprint of its tap where it has one."""
    fingerprint = info.tap.projection_fingerprint[:12]
    return f"{info.method}/{fingerprint}" if fingerprint else info.method


def acceptance_by_commit(step: target_pb2.StepReport) -> list[list[int]]:
    """The packed outcomes of each commit; empty for a verifier that tells none.

    Raises:
        StreamProtocolError: the arrays do not agree, or a number is none that can be.
    """
    num_commits, sizes = len(step.commits.sequence_ids), step.num_acceptance_samples
    if not sizes and not step.acceptance_samples:
        return [[] for _ in range(num_commits)]
    if len(sizes) != num_commits or sum(sizes) != len(step.acceptance_samples):
        raise StreamProtocolError("the outcomes of a step report do not add up")
    values = list(step.acceptance_samples)
    if any(value >> _NUM_BITS for value in values):
        raise StreamProtocolError("a step report carries an outcome that cannot be")
    by_commit, offset = [], 0
    for size in sizes:
        by_commit.append(values[offset : offset + size])
        offset += size
    return by_commit


class AcceptanceCounter:
    """Counts since the last frame; bounded.

    Attributes:
        num_dropped: outcomes that found no room.
    """

    def __init__(self) -> None:
        self.num_dropped = 0
        self._drafters: dict[str, tuple[Counts, Counts]] = {}

    def __bool__(self) -> bool:
        return bool(self._drafters)

    def add(self, drafter: str, acceptance_samples: Iterable[int]) -> None:
        """Count packed outcomes of one drafter's tokens."""
        tables = self._drafters.get(drafter)
        for outcome in acceptance_samples:
            if tables is None:
                if len(self._drafters) == MAX_DRAFTERS:
                    self.num_dropped += 1
                    continue
                tables = self._drafters[drafter] = (_counts(), _counts())
            own, calibrated = tables
            cell = outcome >> 9
            if cell not in own and len(own) == MAX_CELLS:
                self.num_dropped += 1
                continue
            for counts, place in ((own, cell), (calibrated, outcome >> 1 & 255)):
                count = counts[place]
                count[0] += 1
                count[1] += outcome & 1

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
