"""What the process keeps in memory about one subject.

Responsible for: measurements, the part of them that Redis does not have yet, load, the policy in force and its history.

Deliberately does not know: Redis, gRPC, when to plan. Called by services.scheduler.registry.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from paceline.contract.policy import SpeculationPolicy
from paceline.scheduling.speed import TimedPass
from services.scheduler.measurements import Measurements
from services.scheduler.planning import Planner
from services.scheduler.store import MAX_HISTORY, Synced
from services.scheduler.stored_values import part_to_dict
from services.scheduler.subject import Subject

MAX_PASSES = 4096
_ROUNDS_HALF_LIFE = 64.0


class SubjectState:
    """Everything that this process knows about one subject.

    Attributes:
        measurements: all measurements, including those that Redis does not have yet.
        passes: timed passes since the last decision.
        pending: measured by this process and not yet merged into Redis.
        policy: the policy in force.
        load: running sequences by report stream, that is by target.
        round_fraction: sequences that drafters recently drafted for together, over those that a target ran at
            that time. Below 1 where a target's sequences are spread over drafters, above 1 where targets use
            one drafter.
        longest_draft: most tokens in a row of the drafter's drafts; None where positions alone bound them.
        has_changed: whether something was measured since the last decision.
        is_recovering: whether Redis was away, and may have been emptied.
        history: policies that were published, newest first, as stored in Redis.
    """

    def __init__(self, subject: Subject, planner: Planner) -> None:
        self.subject = subject
        self.planner = planner
        self.measurements = Measurements()
        self.passes: deque[TimedPass] = deque(maxlen=MAX_PASSES)
        self.pending = Measurements()
        self.synced = Synced()
        self.policy: SpeculationPolicy | None = None
        self.history: deque[dict[str, Any]] = deque(maxlen=MAX_HISTORY)
        self.is_policy_stored = False
        self.has_changed = True
        self.is_recovering = False
        self.load: dict[object, int] = {}
        self.round_fraction = 1.0
        self.longest_draft: int | None = None
        self.num_users = 0
        self.synced_at = float("-inf")
        self.changed = asyncio.Condition()
        self.lock = asyncio.Lock()

    @property
    def num_running_sequences(self) -> int:
        """Sum over all report streams."""
        return sum(self.load.values())

    @property
    def sequences_per_target(self) -> int:
        """Mean number of sequences on a target that runs any. Each target makes its own steps."""
        busy = [load for load in self.load.values() if load]
        return math.ceil(sum(busy) / len(busy)) if busy else 0

    def take(self, delta: Measurements, passes: Sequence[TimedPass] = (), num_sequences: int = 0) -> None:
        """Add measurements, and the passes that show what the policy in force brings.

        Args:
            delta: measurements since the last report of the same stream.
            passes: timed passes of the same period.
            num_sequences: sequences that the stream's target runs.
        """
        together = delta.draft_time.mean_sequences
        if together is not None and num_sequences:
            fresh = 1 - 2 ** (-delta.draft_time.count / _ROUNDS_HALF_LIFE)
            self.round_fraction += fresh * (together / num_sequences - self.round_fraction)
        self.measurements = self.measurements.merged(delta)
        self.pending = self.pending.merged(delta)
        self.has_changed = True
        self.passes.extend(passes)

    def to_dict(self) -> dict[str, Any]:
        """For people and tests: the layout stored in Redis, by part."""
        return {
            "key": asdict(self.subject),
            "num_running_sequences": self.num_running_sequences,
            **{part.name: part_to_dict(part) for part in self.measurements.parts()},
            "measured_speed": None if (speed := self.planner.measured_speed) is None else asdict(speed),
            "policy_history": list(self.history),
        }
