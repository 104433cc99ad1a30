"""The speculation cycles of one conductor's sequences: what happens when an event comes in.

Responsible for: handing the verifier's frames, the scheduler's policies and the clock's ticks to their handlers, in
the right order. Deliberately does not know gRPC servers or Ray. Runs on one event loop and never awaits: every method
returns at once, so no peer can hold up another. Called by the verifier's link and by orchestrator.conductor.

The rule that keeps text coming: a drafter may be dead, hung, slow or wrong, and only the number of draft tokens that
reach the verifier changes. The verifier alone decides what the text is and when it ends.
"""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.draft_dispatcher import DraftDispatcher
from orchestrator.placement import Placement
from orchestrator.policy import PolicyInForce
from orchestrator.reports import Reports
from orchestrator.sequence_lifecycle import SequenceLifecycle
from orchestrator.sequence_state import ConductorSequenceState
from orchestrator.sequences import ConductorSequences
from orchestrator.step_handler import StepHandler
from orchestrator.verifier_link import VerifierLink
from paceline.contract.policy import SpeculationPolicy
from paceline.v1 import peer_pb2, target_pb2


class Cycles:
    """Handles the events between one verifier, its drafters and the requests.

    Args:
        sequences: the unfinished sequences.
        lifecycle: opens, resumes and ends them.
        steps: handles step reports.
        verifier: the link whose events come here.
        dispatcher: the drafters' side.
        policy: the policy in force.
        reports: measurements for the scheduler.
        placement: the placement in force.
        clock: loop time.
    """

    def __init__(
        self,
        *,
        sequences: ConductorSequences,
        lifecycle: SequenceLifecycle,
        steps: StepHandler,
        verifier: VerifierLink,
        dispatcher: DraftDispatcher,
        policy: PolicyInForce,
        reports: Reports,
        placement: Callable[[], Placement],
        clock: Callable[[], float],
    ) -> None:
        self._sequences = sequences
        self._lifecycle = lifecycle
        self._steps = steps
        self._verifier = verifier
        self._dispatcher = dispatcher
        self._policy = policy
        self._reports = reports
        self._placement = placement
        self._clock = clock
        self._was_drafter_due: bool | None = None

    # The verifier's events.

    def verifier_up(self, info: peer_pb2.PeerInfo) -> None:
        """Sends the policy and opens the sequences that wait for a verifier."""
        if self._verifier.profile is not None:
            self._reports.profile(self._verifier.profile)
            self._verifier.profile = None
        self._was_drafter_due = None
        self._dispatcher.verifier_up()
        self._send_policy()
        self._lifecycle.verifier_up()

    def verifier_down(self, reason: str) -> None:
        """Sets every sequence back to waiting."""
        self._lifecycle.verifier_down(reason)

    def verifier_frame(self, frame: target_pb2.VerifyResponse) -> None:
        """Handles the openings, then the step, then the failures."""
        for opened in frame.opened:
            self._lifecycle.opened(opened)
        if frame.HasField("step"):
            self._steps.handle(frame.step)
        for failure in frame.failures:
            self._lifecycle.failed(failure)

    # Policy and time.

    def accept_policy(self, policy: SpeculationPolicy) -> None:
        """Puts the scheduler's policy in force at the verifier and the drafters."""
        self._policy.accept(policy)
        self._was_drafter_due = None
        self._send_policy()
        self._dispatcher.send_policy()

    def tick(self) -> None:
        """Runs a few times a second: second attempts, time-outs, and whether steps should wait for drafts."""
        now = self._clock()
        for sequence in self._sequences:
            self._lifecycle.reopen_if_due(sequence)
            if sequence.state is ConductorSequenceState.RUNNING:
                self._dispatcher.retry(sequence, now)
        self._send_policy()

    def _send_policy(self) -> None:
        """Sends the policy where it changed; no step may wait for drafts while no drafter answers."""
        is_colocated = self._placement() == "colocated"
        is_due = is_colocated or self._dispatcher.is_any_answering
        if is_due != self._was_drafter_due and self._verifier.is_up:
            self._was_drafter_due = is_due
            self._verifier.set_policy(
                self._policy.step.for_verifier(is_colocated=is_colocated, is_drafter_due=is_due)
            )
