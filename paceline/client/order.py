"""In which order the events of a call are returned, and when the call is over.

Responsible for: delaying the started event. Deliberately does not know: calls. Called by the two clients.
"""

from __future__ import annotations

from paceline.client.events import Event, Finished, Started, from_response
from paceline.v1 import generation_pb2


class EventOrder:
    """The events of one call in the order in which they are returned.

    A started event is returned with the next event of its choice, so that a call that fails before it returns
    nothing.

    Args:
        num_choices: completions requested.
    """

    def __init__(self, num_choices: int) -> None:
        self._num_running = num_choices
        self._started: dict[int, Started] = {}

    @property
    def is_over(self) -> bool:
        """Whether every choice has finished."""
        return self._num_running == 0

    def push(self, response: generation_pb2.GenerateResponse) -> list[Event]:
        """Adds a response and returns the events to return now."""
        event = from_response(response)
        if event is None:
            return []
        if isinstance(event, Started):
            self._started[event.index] = event
            return []
        started = self._started.pop(event.index, None)
        self._num_running -= isinstance(event, Finished)
        return [event] if started is None else [started, event]
