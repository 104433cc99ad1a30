"""Answers to the conductors: drafts, failures, and the frame that each answer answers.

Responsible for: answering every frame exactly once, and every frame without a pending draft at once. Deliberately does
not know how drafts are made. Used by services.drafter.loop, on its thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from paceline.v1 import drafter_pb2, peer_pb2
from services.drafter.session import DraftSession


@dataclass(slots=True)
class OpenFrame:
    """The newest frame of a session that has not been answered yet."""

    frame_id: int
    arrived_at: float


class Answers:
    """Frames without an answer and failures that were not sent, by session."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open_frames: dict[DraftSession, OpenFrame] = {}
        self._failures: dict[DraftSession, list[peer_pb2.SequenceFailure]] = {}

    @property
    def has_failures(self) -> bool:
        """Whether a failure has not been sent yet."""
        return bool(self._failures)

    def expect(self, session: DraftSession, frame_id: int, arrived_at: float) -> None:
        """A frame came in; it replaces an older one, since an answer covers all frames up to the one it names."""
        self._open_frames[session] = OpenFrame(frame_id, arrived_at)

    def add_failures(self, session: DraftSession, failures: Iterable[peer_pb2.SequenceFailure]) -> None:
        """Adds failures to the next answer of a session."""
        self._failures.setdefault(session, []).extend(failures)

    def forget(self, session: DraftSession) -> None:
        """The session has ended."""
        self._open_frames.pop(session, None)
        self._failures.pop(session, None)

    def send(
        self,
        drafts: Mapping[DraftSession, drafter_pb2.DraftResponse],
        asked: Collection[DraftSession],
        waiting: Collection[DraftSession],
    ) -> None:
        """Answers every session that has drafts or failures, or whose frame waits for no draft.

        A draft that no frame asked for must not answer a frame that waits for another sequence's draft.

        Args:
            drafts: answers of this step, to be completed.
            asked: sessions of which a frame asked for one of these drafts.
            waiting: sessions with a frame that waits for a pending draft.
        """
        for session in {*drafts, *self._failures, *(set(self._open_frames) - set(waiting))}:
            answer = drafts.get(session) or drafter_pb2.DraftResponse()
            is_answered = session in asked or session not in waiting
            frame = self._open_frames.pop(session, None) if is_answered else None
            if frame is not None:
                answer.frame_id = frame.frame_id
                waited_s = self._clock() - frame.arrived_at - answer.draft_us / 1e6
                answer.queue_us = max(int(waited_s * 1e6), 0)
            answer.failures.extend(self._failures.pop(session, ()))
            session.push(answer)
