"""Commands from the network side to the step loop; neither side waits for the other.

Responsible for: the commands, and a queue with a wake-up.

Deliberately does not know: gRPC, what a command does (`commands.py`).

Called by: the servicer, which puts commands; the step loop, which drains them between two steps.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

from paceline.contract.policy import StepPolicy
from paceline.drafts import DraftEntry
from paceline.sampling.rules import LogitRule
from services.verifier.session import VerifySession
from services.verifier.specs import SequenceSpec


@dataclass(frozen=True, slots=True)
class Open:
    """Start a sequence, with the rule of its constraint where it has one."""

    session: VerifySession
    spec: SequenceSpec
    constraint: LogitRule | None = None


@dataclass(frozen=True, slots=True)
class Close:
    """End a sequence of this session."""

    session: VerifySession
    sequence_id: int


@dataclass(frozen=True, slots=True)
class CloseSession:
    """End all sequences of a stream that has ended."""

    session: VerifySession


@dataclass(frozen=True, slots=True)
class AddDrafts:
    """Add draft entries to tries: (sequence id, epoch, entry) each."""

    session: VerifySession
    entries: tuple[tuple[int, int, DraftEntry], ...]
    num_malformed: int


@dataclass(frozen=True, slots=True)
class Attach:
    """Push a sequence's features to a subscriber from a position on."""

    session: VerifySession
    sequence_id: int
    subscriber_id: str
    start: int


@dataclass(frozen=True, slots=True)
class SetPolicy:
    """Replace the policy in force."""

    policy: StepPolicy


Command = Open | Close | CloseSession | AddDrafts | Attach | SetPolicy


class VerifierInbox:
    """A command queue with a wake-up for one consumer thread."""

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()
        self._arrived = threading.Event()

    def put(self, command: Command) -> None:
        """Add a command; never blocks."""
        self._commands.append(command)
        self._arrived.set()

    def wake(self) -> None:
        """Wake a waiting consumer, with or without commands."""
        self._arrived.set()

    def drain(self) -> list[Command]:
        """Take all commands, oldest first."""
        self._arrived.clear()
        drained = []
        while self._commands:
            drained.append(self._commands.popleft())
        return drained

    def drain_drafts(self) -> list[AddDrafts]:
        """Take the drafts, oldest first; all other commands stay in their order."""
        drained = self.drain()
        others = [command for command in drained if not isinstance(command, AddDrafts)]
        if others:
            self._commands.extendleft(reversed(others))
            self._arrived.set()
        return [command for command in drained if isinstance(command, AddDrafts)]

    def wait_until(self, deadline_s: float | None) -> bool:
        """Wait for a command until `deadline_s` on time.monotonic, or without end; False if none arrived."""
        timeout = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        return self._arrived.wait(timeout)
