"""When a step's event is published: as late as possible, and before anything that is sent after the step.

Responsible for: keeping the newest step event until it is due, and the order of events and other frames.

Deliberately does not know: what a step does, how an event becomes frames.

Called by: the step loop and its table of sequences, on the loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.v1 import target_pb2
from services.verifier.report import StepEvent
from services.verifier.session import VerifySession


class StepPublisher:
    """Publishes each step's event exactly once.

    Publishing wakes other threads, and each of them takes the interpreter lock from the step loop. So an event waits
    until the next forward pass begins, which releases the lock. It is published earlier where a peer waits for it
    (`put`), before any other frame (`push`), and before the loop itself waits or ends (`publish`).

    Args:
        on_step: receives each event on the step loop's thread.
    """

    def __init__(self, on_step: Callable[[StepEvent], None]) -> None:
        self._on_step = on_step
        self._pending: StepEvent | None = None

    def put(self, event: StepEvent, *, is_urgent: bool) -> None:
        """Take the event of a finished step; publish it now where it is urgent."""
        self.publish()
        self._pending = event
        if is_urgent:
            self.publish()

    def push(self, session: VerifySession, frame: target_pb2.VerifyResponse) -> None:
        """Send a frame that follows the last step, after that step's event."""
        self.publish()
        session.push(frame)

    def publish(self) -> None:
        """Publish the pending event, if there is one."""
        if self._pending is not None:
            event, self._pending = self._pending, None
            self._on_step(event)
