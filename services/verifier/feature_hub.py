"""Who reads the target's features of which sequence, and what each reader was sent.

Responsible for: one feature log per sequence, the drafters that subscribed, and pushing new features to them.

Deliberately does not know: what the features mean, drafters in this process.

Called by: the step loop, which appends and attaches on its thread; the servicer, which subscribes and reads queues on
the event loop.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.target import TapPart
from paceline.v1 import target_pb2, tensor_pb2
from services.runtime import feature_parts, tensors
from services.runtime.outbox import Outbox
from services.verifier.feature_log import FeatureLog

MAX_QUEUED_CHUNKS = 8192
MAX_READERS = 16
MAX_CHUNK_BYTES = 16 << 20
"""Features of a longer text go in several messages; the first one is shorter, the others have this size."""


class Subscriber(Outbox[target_pb2.StreamFeaturesResponse]):
    """One drafter's StreamFeatures call."""

    def __init__(self, loop: asyncio.AbstractEventLoop, subscriber_id: str) -> None:
        super().__init__(loop, MAX_QUEUED_CHUNKS)
        self.subscriber_id = subscriber_id


@dataclass(slots=True)
class FeatureReader:
    """A subscriber of one sequence's features.

    Attributes:
        epoch: of the sequence; it is sent with the features.
        num_sent: positions that the subscriber has; the next features start here.
    """

    epoch: int
    num_sent: int


class FeatureHub:
    """Feature logs by sequence, and their readers.

    While nobody drafts, the hub is paused: it logs features and pushes none. When drafting resumes, readers get what
    they missed. A lock orders a subscription on the event loop's thread against the step loop's appends.

    Some parts of the features may be read for the newest positions alone. Such features wait until a draft can continue
    from them, because only then the newest positions are known.

    Args:
        project: as in :class:`FeatureLog`.
        parts: columns of the features; empty where readers need all columns of all positions.
    """

    def __init__(self, project: Callable[[Tensor], Tensor], parts: Sequence[TapPart] = ()) -> None:
        self._project = project
        self._parts = tuple(parts)
        self._has_recent = any(part.reach for part in parts)
        self._lock = threading.Lock()
        self._subscribers: dict[str, Subscriber] = {}
        self._logs: dict[int, FeatureLog] = {}
        self._readers: dict[int, dict[str, FeatureReader]] = {}  # sequence -> subscriber
        self._is_paused = False

    def subscribe(self, subscriber: Subscriber) -> None:
        """Register a call and push the logs attached to it; a newer call replaces an older one.

        A sequence may have been attached before its drafter's call arrived, or while the call was broken.
        """
        with self._lock:
            self._subscribers[subscriber.subscriber_id] = subscriber
            for sequence_id, readers in self._readers.items():
                if (reader := readers.get(subscriber.subscriber_id)) is not None:
                    reader.num_sent = 0
                    self._push(sequence_id, subscriber.subscriber_id)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Remove a call, unless a newer one has replaced it."""
        with self._lock:
            if self._subscribers.get(subscriber.subscriber_id) is subscriber:
                del self._subscribers[subscriber.subscriber_id]

    def pause(self, is_paused: bool) -> None:
        """Stop pushing, or push everything that readers missed and continue."""
        with self._lock:
            if self._is_paused is is_paused:
                return
            self._is_paused = is_paused
            for sequence_id, readers in self._readers.items():
                for subscriber_id in readers:
                    self._push(sequence_id, subscriber_id)

    def open(self, sequence_id: int, *, last_only: bool = False) -> None:
        """Start a log; with `last_only` it keeps the newest position alone."""
        with self._lock:
            self._logs[sequence_id] = FeatureLog(self._project, last_only=last_only)

    def close(self, sequence_id: int) -> None:
        """Drop a log and its readers."""
        with self._lock:
            self._logs.pop(sequence_id, None)
            self._readers.pop(sequence_id, None)

    def attach(self, sequence_id: int, epoch: int, subscriber_id: str, start: int) -> None:
        """Push a sequence's features to `subscriber_id` from `start` on, what is in the log included.

        A sequence has at most `MAX_READERS` readers; a further one replaces the oldest.
        """
        with self._lock:
            if sequence_id in self._logs:
                readers = self._readers.setdefault(sequence_id, {})
                readers.pop(subscriber_id, None)
                readers[subscriber_id] = FeatureReader(epoch, start)
                if len(readers) > MAX_READERS:
                    del readers[next(iter(readers))]
                self._push(sequence_id, subscriber_id)

    def length(self, sequence_id: int) -> int:
        """Positions whose features are logged; 0 without a log."""
        with self._lock:
            log = self._logs.get(sequence_id)
            return 0 if log is None else log.length

    def first(self, sequence_id: int, num_positions: int) -> Tensor | None:
        """Features `[num_positions, width]` of a sequence's first positions; None where fewer, or none, are logged."""
        kept = self.kept(sequence_id, num_positions)
        return None if kept is None else kept(num_positions)

    def kept(self, sequence_id: int, num_positions: int) -> Callable[[int], Tensor] | None:
        """A function that gives a sequence's first features, even after the sequence is closed; None as in `first`.

        This call projects nothing: captured rows stay as they are until the function is called.

        Args:
            sequence_id: the sequence.
            num_positions: most positions that the function will be asked for.
        """
        with self._lock:
            log = self._logs.get(sequence_id)
            if log is None or log.first > 0 or log.length < max(num_positions, 1):
                return None
            return functools.partial(self._head, log)

    def _head(self, log: FeatureLog, num_positions: int) -> Tensor:
        with self._lock:
            logged = log.since(0)
        assert logged is not None, "the log is as long"
        return logged[1][:num_positions]

    def append(
        self,
        sequence_id: int,
        start: int,
        rows: Tensor,
        tokens: Sequence[int] = (),
        *,
        is_projected: bool = True,
    ) -> None:
        """Log the features of a sequence's positions and push them to its readers.

        Positions that are in the log are neither logged nor pushed again: a preempted sequence runs its text twice.

        Args:
            sequence_id: the sequence.
            start: position of the first row, at most the log's length unless only the newest position is logged.
            rows: `[n, width]` of the kept positions of the step.
            tokens: what the step committed, up to the position after the last row; they are sent but not logged.
            is_projected: False where the rows are as the target captured them.
        """
        with self._lock:
            log = self._logs.get(sequence_id)
            if log is None:
                return
            is_joined = log.last_only or start <= log.length
            assert is_joined, f"features from {log.length} to {start - 1} are missing"
            fresh = rows[max(log.length - start, 0) :]
            if not len(fresh):
                return
            start = max(start, log.length)
            log.append(start, fresh, is_projected=is_projected)
            log.has_root = bool(tokens)
            for subscriber_id, reader in self._readers.get(sequence_id, {}).items():
                is_all = is_projected and reader.num_sent == start
                self._push(sequence_id, subscriber_id, fresh if is_all else None, tokens)

    def _push(
        self, sequence_id: int, subscriber_id: str, rows: Tensor | None = None, tokens: Sequence[int] = ()
    ) -> None:
        """Send a reader what it is missing: `rows` where they are exactly that, else the rest of the log."""
        subscriber = self._subscribers.get(subscriber_id)
        if subscriber is None or self._is_paused:
            return
        reader, log = self._readers[sequence_id][subscriber_id], self._logs[sequence_id]
        if self._has_recent and not log.has_root:
            return
        logged = log.since(reader.num_sent) if rows is None else (reader.num_sent, rows)
        if logged is None:
            return
        start, rows = logged
        most = max(MAX_CHUNK_BYTES // (rows.shape[1] * rows.itemsize), 1)
        first = 0
        while first < len(rows):
            end = first + ((len(rows) - first - 1) % most + 1)  # the remainder goes first
            is_last = end == len(rows)
            whole, recent = feature_parts.cut(rows[first:end], self._parts, len(rows) - end)
            subscriber.push(
                target_pb2.StreamFeaturesResponse(
                    sequence_id=sequence_id,
                    epoch=reader.epoch,
                    start=start + first,
                    features=tensors.encode(whole),
                    tokens=tokens if is_last else (),
                    recent=[tensors.encode(part) if len(part) else tensor_pb2.Tensor() for part in recent],
                )
            )
            first = end
        reader.num_sent = log.length
