"""The draft loop's inbox: frames and features on their way from the network side to the loop's thread.

Neither side waits for the other: the servicer and the feature subscriptions put items, the loop takes all at once.
Knows neither gRPC nor drafters.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from torch import Tensor

from paceline.contract.policy import StepPolicy
from paceline.sampling.params import SamplingParams
from paceline.v1 import peer_pb2
from services.drafter.session import DraftSession
from services.runtime.frames import Commit


@dataclass(frozen=True, slots=True)
class Opening:
    """A checked OpenDraftSequence."""

    local_id: int
    sequence_id: int
    epoch: int
    tokens: tuple[int, ...]
    sampling: SamplingParams
    max_draft_tokens: int
    partition: int = 0
    num_partitions: int = 1
    reads_features: bool = False


@dataclass(frozen=True, slots=True)
class Frame:
    """A checked DraftRequest. Closes apply before openings, openings before commits."""

    session: DraftSession
    frame_id: int
    arrived_at: float
    closes: tuple[int, ...] = ()
    openings: tuple[Opening, ...] = ()
    commits: tuple[Commit, ...] = ()
    policy: StepPolicy | None = None
    failures: tuple[peer_pb2.SequenceFailure, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """A stream has ended, and with it all of its sequences."""

    session: DraftSession


@dataclass(frozen=True, slots=True)
class Features:
    """Features `rows` [n, width] of a sequence's positions from `start` on.

    Attributes:
        tokens: committed in the same step; the position of the last one follows that of the last row.
        arrived_at: when they came in.
    """

    local_id: int
    start: int
    rows: Tensor
    tokens: tuple[int, ...] = ()
    arrived_at: float = 0.0

    @property
    def tokens_start(self) -> int:
        """Position of the first token."""
        return self.start + len(self.rows) + 1 - len(self.tokens)


@dataclass(frozen=True, slots=True)
class FeaturesLost:
    """No more features of a sequence will come."""

    local_id: int
    reason: str
    message: str


Item = Frame | SessionEnded | Features | FeaturesLost


class DrafterInbox:
    """Items in order of arrival."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, item: Item) -> None:
        """Adds an item; any thread may call it."""
        with self._changed:
            self._items.append(item)
            self._changed.notify()

    def close(self) -> None:
        """Wakes the loop and lets it end."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    @property
    def is_closed(self) -> bool:
        """Whether the loop is to end."""
        return self._is_closed

    @property
    def is_empty(self) -> bool:
        """Whether no item waits; may be out of date when it is read."""
        return not self._items

    def take(self, timeout_s: float | None) -> list[Item]:
        """Waits for an item, `timeout_s` at most, and takes all items."""
        with self._changed:
            if not self._items and not self._is_closed and timeout_s != 0:
                self._changed.wait(timeout_s)
            items = list(self._items)
            self._items.clear()
            return items
