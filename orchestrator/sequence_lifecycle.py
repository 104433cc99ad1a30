"""The life of a request at the conductor: begin, open at the verifier, resume after a loss, end.

Responsible for: every change of a sequence's state. A request continues as long as a verifier can be found within
the bounds of `Patience`, and ends exactly once. Deliberately does not know gRPC or step reports.
Called by orchestrator.cycles, orchestrator.step_handler and orchestrator.servicer; never awaits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from orchestrator.commit_log import CommitLog
from orchestrator.counters import Counters
from orchestrator.draft_dispatcher import DraftDispatcher
from orchestrator.faults import RETRY_DELAY_S, error_of
from orchestrator.output_queue import Ending, OutputQueue
from orchestrator.placement import DrafterRequirement, Placement
from orchestrator.reports import Reports
from orchestrator.sequence_state import ConductorSequenceState
from orchestrator.sequences import ConductorSequences, Sequence
from orchestrator.verifier_link import VerifierLink
from paceline.contract.errors import PacelineError, StreamProtocolError, UnavailableError
from paceline.contract.failures import RETRIABLE_CODES, StatusCode
from paceline.v1 import generation_pb2, orchestrator_pb2, peer_pb2, sampling_pb2, target_pb2

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Patience:
    """Bounds on recovery.

    Attributes:
        max_resumes: openings of one request at a verifier after the first.
        resume_timeout_s: longest wait for a verifier in a row, seconds.
    """

    max_resumes: int = 5
    resume_timeout_s: float = 60.0


class SequenceLifecycle:
    """Begins, opens, sets back and ends the sequences of one conductor.

    Args:
        sequences: the unfinished sequences.
        verifier: where they run.
        dispatcher: the drafters' side.
        reports: gets the statistics of ended requests.
        counters: the conductor's.
        patience: bounds on recovery.
        placement: the placement in force.
        clock: loop time.
    """

    def __init__(
        self,
        *,
        sequences: ConductorSequences,
        verifier: VerifierLink,
        dispatcher: DraftDispatcher,
        reports: Reports,
        counters: Counters,
        patience: Patience,
        placement: Callable[[], Placement],
        clock: Callable[[], float],
    ) -> None:
        self._sequences = sequences
        self._verifier = verifier
        self._dispatcher = dispatcher
        self._reports = reports
        self._counters = counters
        self._patience = patience
        self._placement = placement
        self._clock = clock

    @property
    def num_running(self) -> int:
        """Unfinished sequences."""
        return len(self._sequences)

    def is_running(self, request_id: str) -> bool:
        """Whether a request with this id is unfinished."""
        return request_id in self._sequences

    def no_draft_reason(self, sequence: Sequence) -> generation_pb2.NoDraftReason:
        """Why a step of a running sequence had no drafts."""
        return self._dispatcher.no_draft_reason(sequence, is_colocated=self._placement() == "colocated")

    # Calls of the servicer.

    def begin(self, request: orchestrator_pb2.RunRequest, max_draft_nodes: int) -> Sequence:
        """Starts a request whose fields have been checked."""
        now = self._clock()
        sequence = Sequence(
            request_id=request.request_id,
            commit_log=CommitLog(request.prompt_token_ids, request.num_resumed_tokens),
            sampling=request.sampling,
            max_new_tokens=request.max_new_tokens,
            stop_token_ids=tuple(request.stop_token_ids),
            max_draft_nodes=max_draft_nodes,
            max_draft_tokens=max_draft_nodes,
            log_probs=request.log_probs,
            output_queue=OutputQueue(max(request.stream_interval, 1)),
            tenant=request.tenant,
            started_at=now,
            pending_since=now,
        )
        sequence.drafting.is_off = max_draft_nodes == 0
        sequence.drafting.requirement = DrafterRequirement.read(request.speculation)
        self._sequences.add(sequence)
        self._counters.num_requests += 1
        if self._verifier.is_up:
            self._open(sequence)
        return sequence

    def end(self, sequence: Sequence) -> None:
        """Releases a request: it has finished, or its reader went away."""
        if sequence.state is not ConductorSequenceState.FINISHED:
            self._counters.num_cancelled += 1
            self._close_at_verifier(sequence)
            self.finish(sequence, Ending(sampling_pb2.FINISH_REASON_CANCELLED))

    def end_all(self, error: PacelineError) -> None:
        """Ends every request with an error: the bound of the drain is reached."""
        for sequence in self._sequences:
            self._close_at_verifier(sequence)
            self.finish(sequence, Ending(sampling_pb2.FINISH_REASON_ERROR, error))

    def _close_at_verifier(self, sequence: Sequence) -> None:
        if sequence.sequence_id:
            self._verifier.close(sequence.sequence_id)

    # Events of the verifier.

    def verifier_up(self) -> None:
        """Opens every sequence that waits for a verifier."""
        for sequence in self._sequences:
            if sequence.state is ConductorSequenceState.PENDING:
                self._open(sequence)

    def verifier_down(self, reason: str) -> None:
        """Sets every sequence back to waiting, with the text it has so far."""
        for sequence in self._sequences:
            if sequence.state in (ConductorSequenceState.OPENING, ConductorSequenceState.RUNNING):
                self.set_back(sequence, UnavailableError(f"the verifier was lost: {reason}"))

    def opened(self, opened: target_pb2.SequenceOpened) -> None:
        """The verifier has accepted an opening; the drafters get the sequence now.

        Raises:
            StreamProtocolError: the verifier gave an id that another sequence has.
        """
        sequence = self._sequences.by_key(opened.key)
        if sequence is None:  # cancelled meanwhile
            self._verifier.close(opened.sequence_id)
            return
        if opened.sequence_id == 0 or self._sequences.by_id(opened.sequence_id) is not None:
            raise StreamProtocolError(f"the verifier named sequence {opened.sequence_id}, which is taken")
        sequence.move_to(ConductorSequenceState.RUNNING)
        sequence.epoch = opened.epoch
        self._sequences.assign_id(sequence, opened.sequence_id)
        self._dispatcher.attach(sequence)

    def failed(self, failure: peer_pb2.SequenceFailure) -> None:
        """A sequence, or its opening, failed at the verifier: it is opened again where that may help."""
        sequence = self._sequences.by_id(failure.sequence_id) or self._sequences.by_key(failure.key)
        if sequence is None:
            return
        error = error_of(failure)
        log.warning("sequence failed at the verifier", request_id=sequence.request_id, reason=failure.reason)
        is_first_opening = sequence.state is ConductorSequenceState.OPENING and sequence.num_resumes == 0
        is_refusal = is_first_opening and failure.code == StatusCode.RESOURCE_EXHAUSTED
        if failure.code in RETRIABLE_CODES and not is_refusal:
            self.set_back(sequence, error, delay_s=RETRY_DELAY_S * 2**sequence.num_resumes)
        else:
            self.finish(sequence, Ending(sampling_pb2.FINISH_REASON_ERROR, error))

    # Openings and ends.

    def reopen_if_due(self, sequence: Sequence) -> None:
        """Opens a waiting sequence once its pause is over; ends it when no verifier was found in time."""
        if sequence.state is not ConductorSequenceState.PENDING:
            return
        now = self._clock()
        if now - sequence.pending_since > self._patience.resume_timeout_s:
            error = UnavailableError(
                f"no verifier for {self._patience.resume_timeout_s:g} s: {self._verifier.last_reason}"
            )
            self.finish(sequence, Ending(sampling_pb2.FINISH_REASON_ERROR, error))
        elif self._verifier.is_up and now >= sequence.not_before:
            self._open(sequence)

    def _open(self, sequence: Sequence) -> None:
        if len(self._sequences) == 1:
            self._verifier.note_work()
        sequence.move_to(ConductorSequenceState.OPENING)
        self._verifier.open(
            target_pb2.OpenSequence(
                key=self._sequences.assign_key(sequence),
                prompt_token_ids=sequence.commit_log.tokens,
                sampling=sequence.sampling,
                max_new_tokens=sequence.max_new_tokens,
                stop_token_ids=sequence.stop_token_ids,
                max_draft_nodes=sequence.max_draft_nodes,
                epoch=sequence.epoch,
                num_resumed_tokens=sequence.commit_log.num_generated_tokens,
                log_probs=sequence.missing_log_probs,
                reads_features=self._reads_features(sequence),
            )
        )

    def _reads_features(self, sequence: Sequence) -> bool | None:
        """Whether the verifier's own drafter is to read the target's features; None where that drafter is not used."""
        own = self._verifier.info
        is_unused = own is not None and bool(own.method) and self._placement() != "colocated"
        return None if is_unused else sequence.drafting.requirement.reads_features

    def set_back(self, sequence: Sequence, error: PacelineError, delay_s: float = 0.0) -> None:
        """Lets a sequence wait for a verifier again, in a new epoch.

        Args:
            sequence: one that is opening or running.
            error: how the request ends if it was set back too often.
            delay_s: pause before the next opening, seconds.
        """
        self._dispatcher.detach(sequence)
        self._sequences.forget_id(sequence)
        if sequence.num_resumes >= self._patience.max_resumes:
            self.finish(sequence, Ending(sampling_pb2.FINISH_REASON_ERROR, error))
            return
        sequence.move_to(ConductorSequenceState.PENDING)
        sequence.num_resumes += 1
        sequence.epoch += 1
        sequence.pending_since = self._clock()
        sequence.not_before = sequence.pending_since + delay_s
        self._counters.num_resumes += 1

    def finish(self, sequence: Sequence, ending: Ending) -> None:
        """Ends a request: drafters and tables forget it, its reader gets the ending."""
        self._dispatcher.detach(sequence)
        sequence.move_to(ConductorSequenceState.FINISHED)
        self._sequences.remove(sequence)
        self._counters.finished[ending.finish_reason] += 1
        if sequence.tenant:
            self._reports.ended(sequence.tenant, sequence.generation_stats())
        sequence.output_queue.end(ending)
        sequence.output_queue.wake()
