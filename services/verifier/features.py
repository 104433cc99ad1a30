"""Target features on their way to drafters: a log per sequence, and the subscribers that read it.

A log keeps what a tap gave for every committed position, so that a drafter that joins late or restarts gets all of
it without a second target pass (EAGLE-3 on SmolLM2: 1.1 kB a token); of a tap that is read at the newest position alone
it keeps that one. Knows nothing of tensors' meaning. The loop
appends and attaches from its thread, the servicer reads a subscriber's queue on the event loop.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.target import TapPart
from paceline.v1 import target_pb2, tensor_pb2
from services.runtime import feature_parts, tensors
from services.runtime.outbox import Outbox

MAX_QUEUED_CHUNKS = 8192
MAX_READERS = 16
MAX_CHUNK_BYTES = 16 << 20
"""A longer text's features go in several messages, the last of them as long as it may be."""


def owned(rows: Tensor) -> Tensor:
    """Rows in memory of their own: a view that is kept would keep all rows of its step."""
    return rows.clone() if rows.untyped_storage().nbytes() > 2 * rows.nbytes else rows


class Subscriber(Outbox[target_pb2.StreamFeaturesResponse]):
    """One drafter's StreamFeatures call."""

    def __init__(self, loop: asyncio.AbstractEventLoop, subscriber_id: str) -> None:
        super().__init__(loop, MAX_QUEUED_CHUNKS)
        self.subscriber_id = subscriber_id


class FeatureLog:
    """Features of one sequence's committed positions, `first` up to `length`.

    A drafter that reads the newest position alone needs nothing older, whenever it joins: with `last_only` that is all
    that is kept, and positions may be left out.

    Args:
        project: turns rows as the target captured them, `[n, sources]`, into features `[n, width]`.
        last_only: whether the newest position is all that is kept.
    """

    def __init__(self, project: Callable[[Tensor], Tensor], *, last_only: bool = False) -> None:
        self._project = project
        self._chunks: list[Tensor] = []  # each [n, width], in order
        self._captured: list[Tensor] = []  # each [n, sources]: what follows them and nobody has asked for yet
        self.last_only = last_only
        self.first = 0
        self.length = 0
        # Whether a token was committed behind the last position, so that a draft can go on there.
        self.has_root = False

    def append(self, start: int, rows: Tensor, *, is_projected: bool = True) -> None:
        """Add features of positions from `start` on: where the log ends, with `last_only` maybe later.

        Args:
            start: position of the first row.
            rows: features `[n, width]`, or what is to become them once somebody asks.
            is_projected: which of the two.
        """
        assert start == self.length or (self.last_only and start > self.length)
        self.length = start + int(rows.shape[0])
        if self.last_only:
            self.first, rows = self.length - 1, rows[-1:]
            self._chunks, self._captured = [], []
        rows = owned(rows)
        if is_projected:
            self._project_captured()
        (self._chunks if is_projected else self._captured).append(rows)

    def since(self, start: int) -> tuple[int, Tensor] | None:
        """Features of positions from `start` to the end, as far as they are kept; None if there are none.

        Returns:
            Position of the first row, and `[n, width]`.
        """
        if start >= self.length:
            return None
        self._project_captured()
        if len(self._chunks) > 1:
            self._chunks = [torch.cat(self._chunks)]
        start = max(start, self.first)
        return start, self._chunks[0][start - self.first :]

    def _project_captured(self) -> None:
        if self._captured:
            self._chunks.append(self._project(torch.cat(self._captured)).cpu())
            self._captured = []


@dataclass(slots=True)
class Reader:
    """A subscriber of one sequence's features.

    Attributes:
        epoch: of the sequence, which the subscriber is told with its features.
        num_sent: positions it has been sent, or had before; what comes next starts here.
    """

    epoch: int
    num_sent: int


class FeatureHub:
    """Logs by sequence, and who reads them.

    While it is paused, features are logged and not pushed: nobody drafts. Readers get what they missed when it goes on.
    The lock orders a subscription on the event loop's thread against the step loop's appends.

    Features with parts that are read of the newest positions alone wait until a draft can go on from them: only then is
    it known which those are.

    Args:
        project: as in :class:`FeatureLog`.
        parts: columns of the features; empty where all are read of all positions.
    """

    def __init__(self, project: Callable[[Tensor], Tensor], parts: Sequence[TapPart] = ()) -> None:
        self._project = project
        self._parts = tuple(parts)
        self._has_recent = any(part.reach for part in parts)
        self._lock = threading.Lock()
        self._subscribers: dict[str, Subscriber] = {}
        self._logs: dict[int, FeatureLog] = {}
        self._readers: dict[int, dict[str, Reader]] = {}  # sequence -> subscriber
        self._is_paused = False

    def subscribe(self, subscriber: Subscriber) -> None:
        """Register a call and replay the logs attached to it; a newer call replaces an older one.

        A sequence may have been attached before its drafter's call came in, or while the call was down.
        """
        with self._lock:
            self._subscribers[subscriber.subscriber_id] = subscriber
            for sequence_id, readers in self._readers.items():
                if (reader := readers.get(subscriber.subscriber_id)) is not None:
                    reader.num_sent = 0
                    self._push(sequence_id, subscriber.subscriber_id)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Forget a call, unless a newer one has taken its place."""
        with self._lock:
            if self._subscribers.get(subscriber.subscriber_id) is subscriber:
                del self._subscribers[subscriber.subscriber_id]

    def pause(self, is_paused: bool) -> None:
        """Stop pushing, or go on with all that was held back."""
        with self._lock:
            if self._is_paused is is_paused:
                return
            self._is_paused = is_paused
            for sequence_id, readers in self._readers.items():
                for subscriber_id in readers:
                    self._push(sequence_id, subscriber_id)

    def open(self, sequence_id: int, *, last_only: bool = False) -> None:
        """Start a log; with `last_only` of the newest position alone."""
        with self._lock:
            self._logs[sequence_id] = FeatureLog(self._project, last_only=last_only)

    def close(self, sequence_id: int) -> None:
        """Drop a log and its readers."""
        with self._lock:
            self._logs.pop(sequence_id, None)
            self._readers.pop(sequence_id, None)

    def attach(self, sequence_id: int, epoch: int, subscriber_id: str, start: int) -> None:
        """Push a sequence's features to `subscriber_id` from `start` on, replaying what is in the log.

        Of more than `MAX_READERS` of one sequence the one that came first gives way.
        """
        with self._lock:
            if sequence_id in self._logs:
                readers = self._readers.setdefault(sequence_id, {})
                readers.pop(subscriber_id, None)
                readers[subscriber_id] = Reader(epoch, start)
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
        """What gives those of up to so many first positions, also once the sequence is closed; None as in `first`.

        Nothing is computed for it: rows that nobody has asked for yet stay as the target captured them.
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

        What is logged already is neither logged nor pushed again: a sequence that lost its slot runs its text twice.

        Args:
            sequence_id: the sequence.
            start: position of the first row, at most the log's length unless only the newest position is logged.
            rows: `[n, width]` of the positions that the step settled.
            tokens: what the step committed, up to the position behind the last row; they are not logged.
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
        """Send a reader what it has not been sent: `rows`, if they are just that, or as much of the log."""
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
            end = first + ((len(rows) - first - 1) % most + 1)  # what is over goes first
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
