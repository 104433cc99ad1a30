"""The speculation cycles of one conductor's sequences.

Responsible for: what happens when a step report, a draft, a failure, a connection or a request comes in: commits go
to drafters first and to readers second, drafts go to the verifier, lost peers are replaced. Deliberately does not
know gRPC servers or Ray. Runs on one event loop and never awaits: every method returns at once, so no peer can hold
up another. Called by the links, by orchestrator.conductor (clock ticks) and by orchestrator.servicer.

The rule that keeps text going: a drafter may be dead, hung, slow or wrong, and all that changes is how many draft
tokens reach the verifier. Only the verifier decides and ends text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from orchestrator.commit_log import CommitGapError, CommitLog
from orchestrator.counters import Counters
from orchestrator.draft_acceptance import acceptance_by_commit, drafter_label
from orchestrator.draft_dispatcher import DraftDispatcher
from orchestrator.faults import RESOURCE_EXHAUSTED, RETRIABLE_CODES, RETRY_DELAY_S, error_of
from orchestrator.log_probs import check_step, fresh_log_probs, take_prompt_log_probs
from orchestrator.output_queue import Ending, OutputQueue
from orchestrator.placement import DrafterRequirement, Placement
from orchestrator.policy import PolicyInForce
from orchestrator.reports import Reports
from orchestrator.sequences import ConductorSequences, ConductorSequenceState, Sequence
from orchestrator.verifier_link import VerifierLink
from paceline.contract.errors import PacelineError, StreamProtocolError, UnavailableError
from paceline.v1 import orchestrator_pb2, peer_pb2, sampling_pb2, scheduler_pb2, target_pb2

FINISH_REASONS = frozenset(sampling_pb2.FinishReason.values())

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Patience:
    """Bounds on recovery.

    Attributes:
        max_resumes: openings of one request at a verifier after the first.
        resume_timeout_s: longest wait for a verifier in a row.
    """

    max_resumes: int = 5
    resume_timeout_s: float = 60.0


class Cycles:
    """State machine between one verifier, its drafters and the requests.

    Attributes:
        table: the unfinished sequences; the drafters' side reads it.
        verifier: set by the conductor before the first event.
        dispatcher: the drafters' side; set by the conductor before the first event.
    """

    verifier: VerifierLink
    dispatcher: DraftDispatcher

    def __init__(
        self,
        *,
        policy: PolicyInForce,
        reports: Reports,
        counters: Counters,
        patience: Patience,
        placement: Callable[[], Placement],
        clock: Callable[[], float],
    ) -> None:
        self._policy = policy
        self._reports = reports
        self._counters = counters
        self._patience = patience
        self._placement = placement
        self._clock = clock
        self._commit_log = CommitLog()
        self.table = ConductorSequences()
        self._was_drafter_due: bool | None = None

    @property
    def num_running(self) -> int:
        """Unfinished sequences."""
        return len(self.table)

    def is_running(self, request_id: str) -> bool:
        """Whether a request with this id is unfinished."""
        return request_id in self._commit_log

    # Requests.

    def begin(self, request: orchestrator_pb2.RunRequest, max_draft_nodes: int) -> Sequence:
        """Takes up a request whose fields have been checked."""
        now = self._clock()
        entry = self._commit_log.open(
            request.request_id, request.prompt_token_ids, request.num_resumed_tokens
        )
        sequence = Sequence(
            entry=entry,
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
        self.table.add(sequence)
        self._counters.num_requests += 1
        if self.verifier.is_up:
            self._open(sequence)
        return sequence

    def end(self, sequence: Sequence) -> None:
        """Lets go of a request: finished, or its reader went away."""
        if sequence.state is not ConductorSequenceState.FINISHED:
            self._counters.num_cancelled += 1
            if sequence.sequence_id:
                self.verifier.close(sequence.sequence_id)
            self._finish(sequence, Ending(sampling_pb2.FINISH_REASON_CANCELLED))

    def end_all(self, error: PacelineError) -> None:
        """Ends every request with an error: the drain bound is reached."""
        for sequence in self.table:
            if sequence.sequence_id:
                self.verifier.close(sequence.sequence_id)
            self._finish(sequence, Ending(sampling_pb2.FINISH_REASON_ERROR, error))

    # The verifier's side.

    def verifier_up(self, info: peer_pb2.PeerInfo) -> None:
        """Opens what waits for a verifier."""
        if self.verifier.profile is not None:
            self._reports.profile(self.verifier.profile)
            self.verifier.profile = None
        self._was_drafter_due = None
        self.dispatcher.verifier_up()
        self._send_policy()
        for sequence in self.table:
            if sequence.state is ConductorSequenceState.PENDING:
                self._open(sequence)

    def verifier_down(self, reason: str) -> None:
        """Sets every sequence back to waiting, with all it has so far."""
        for sequence in self.table:
            if sequence.state in (ConductorSequenceState.OPENING, ConductorSequenceState.RUNNING):
                error = UnavailableError(f"the verifier was lost: {reason}")
                self._set_back(sequence, error, not_before=self._clock())

    def verifier_frame(self, frame: target_pb2.VerifyResponse) -> None:
        """Openings, then the step, then failures."""
        for opened in frame.opened:
            self._opened(opened)
        if frame.HasField("step"):
            self._step(frame.step)
        for failure in frame.failures:
            self._failed(failure)

    def _open(self, sequence: Sequence) -> None:
        if len(self.table) == 1:
            self.verifier.note_work()
        sequence.move_to(ConductorSequenceState.OPENING)
        self.verifier.open(
            target_pb2.OpenSequence(
                key=self.table.name_key(sequence),
                prompt_token_ids=sequence.entry.tokens,
                sampling=sequence.sampling,
                max_new_tokens=sequence.max_new_tokens,
                stop_token_ids=sequence.stop_token_ids,
                max_draft_nodes=sequence.max_draft_nodes,
                epoch=sequence.epoch,
                num_resumed_tokens=sequence.entry.num_generated_tokens,
                log_probs=sequence.open_log_probs,
                reads_features=self._is_to_be_read(sequence),
            )
        )

    def _is_to_be_read(self, sequence: Sequence) -> bool | None:
        """What the verifier is told of a sequence's features; nothing where its own drafter stands idle."""
        own = self.verifier.info
        is_idle = own is not None and bool(own.method) and self._placement() != "colocated"
        return None if is_idle else sequence.drafting.requirement.reads_features

    def _opened(self, opened: target_pb2.SequenceOpened) -> None:
        sequence = self.table.by_key(opened.key)
        if sequence is None:  # cancelled meanwhile
            self.verifier.close(opened.sequence_id)
            return
        if opened.sequence_id == 0 or self.table.by_id(opened.sequence_id) is not None:
            raise StreamProtocolError(f"the verifier named sequence {opened.sequence_id}, which is taken")
        sequence.move_to(ConductorSequenceState.RUNNING)
        sequence.epoch = opened.epoch
        self.table.name_id(sequence, opened.sequence_id)
        self.dispatcher.attach(sequence)

    def _step(self, step: target_pb2.StepReport) -> None:
        """Journals the commits, forwards them to the drafters, then wakes the readers."""
        commits = step.commits
        num_commits = len(commits.sequence_ids)
        arrays = (commits.epochs, commits.starts, commits.sizes)
        # A verifier of an earlier version knows no n-gram proposals: all of its trees are a drafter's.
        drafter_depths = step.drafter_depths or step.draft_depths
        accepted_of_drafter = step.num_accepted_of_drafter or step.num_accepted_tokens
        figures = (
            step.num_draft_tokens,
            step.draft_depths,
            step.num_accepted_tokens,
            drafter_depths,
            accepted_of_drafter,
            step.finish_reasons,
        )
        if any(len(array) != num_commits for array in (*arrays, *figures)):
            raise StreamProtocolError("the arrays of a step report differ in length")
        tokens = list(commits.tokens)
        if sum(commits.sizes) != len(tokens):
            raise StreamProtocolError("the commits of a step report do not add up")
        if any(reason not in FINISH_REASONS for reason in step.finish_reasons):
            raise StreamProtocolError("a step report carries an unknown finish reason")
        vocab_size = 0 if self.verifier.info is None else self.verifier.info.vocab_size
        log_probs = check_step(step, self.table, vocab_size)
        for sequence_id, message in log_probs.items():
            asking = self.table.by_id(sequence_id)
            if asking is not None:
                take_prompt_log_probs(asking, message, vocab_size)
        outcomes = acceptance_by_commit(step)
        hits = step.cache_hits if len(step.cache_hits) == num_commits else [0] * num_commits
        now = self._clock()
        counters = self._counters
        counters.num_steps += 1
        # With each: whether it has new tokens, and why it ended.
        advanced: list[tuple[Sequence, bool, sampling_pb2.FinishReason]] = []
        depths: list[tuple[int, int]] = []
        faulty: list[tuple[Sequence, CommitGapError]] = []
        offset = 0
        for i, sequence_id in enumerate(commits.sequence_ids):
            size = commits.sizes[i]
            span = tokens[offset : offset + size]
            offset += size
            sequence = self.table.by_id(sequence_id)
            if sequence is None or sequence.epoch != commits.epochs[i]:
                counters.num_stale_commits += 1
                continue
            try:
                fresh = sequence.entry.commit(commits.starts[i], span)
            except CommitGapError as error:
                faulty.append((sequence, error))
                continue
            counters.num_committed_tokens += len(fresh)
            depth, accepted = step.draft_depths[i], min(step.num_accepted_tokens[i], step.draft_depths[i])
            if outcomes[i] and (drafter := self._drafter_of(sequence)):
                self._reports.outcomes.add(drafter, outcomes[i])
            sequence.counts.add(step.num_draft_tokens[i], depth, accepted)
            if depth:
                counters.num_draft_tokens += step.num_draft_tokens[i]
                counters.num_accepted_tokens += accepted
            # An n-gram proposal says nothing of the drafter; and what one that reads features made without them says
            # less than a draft with them: the planner knows by how much.
            if (drafter_depth := drafter_depths[i]) and not sequence.drafting.is_past_outcome:
                depths.append((drafter_depth, min(accepted_of_drafter[i], drafter_depth)))
            is_hit = bool(hits[i]) and self._policy.outcomes > 0
            sequence.drafting.is_past_outcome = is_hit and sequence.drafting.reads_features
            if fresh:
                known = fresh_log_probs(sequence, log_probs.get(sequence_id), size, len(fresh))
                sequence.output_queue.put(fresh, known)
                sequence.last_token_at = now
                if sequence.first_token_at is None:
                    sequence.first_token_at = now
            advanced.append((sequence, bool(fresh), step.finish_reasons[i]))
        self.dispatcher.forward(
            [sequence for sequence, has_new, reason in advanced if has_new and not reason]
        )
        for sequence, _, reason in advanced:
            if reason:
                self._finish(sequence, Ending(reason))
            else:
                sequence.output_queue.wake()
        for sequence, gap in faulty:
            log.warning("commit gap", request_id=sequence.entry.request_id, error=str(gap))
            self.verifier.close(sequence.sequence_id)
            self._set_back(sequence, UnavailableError(str(gap)), not_before=now)
            self._reopen_due(sequence, now)
        self._reports.step(
            step,
            depths,
            len(self.table),
            self._policy.draft_length,
            num_tokens=len(tokens),
            may_draft=all(not sequence.drafting.is_off for sequence, _, _ in advanced),
        )

    def _drafter_of(self, sequence: Sequence) -> str:
        """Who drafts for a sequence; empty where nobody does any more."""
        attachment = next(iter(sequence.drafting.attachments.values()), None)
        if attachment is not None and attachment.link.info is not None:
            return drafter_label(attachment.link.info)
        info = self.verifier.info
        return drafter_label(info) if info is not None and info.method else ""

    def _failed(self, failure: peer_pb2.SequenceFailure) -> None:
        """A sequence, or an opening, failed at the verifier."""
        sequence = (
            self.table.by_id(failure.sequence_id) if failure.sequence_id else self.table.by_key(failure.key)
        )
        if sequence is None:
            return
        error = error_of(failure)
        log.warning(
            "sequence failed at the verifier", request_id=sequence.entry.request_id, reason=failure.reason
        )
        is_refusal = sequence.state is ConductorSequenceState.OPENING and sequence.num_resumes == 0
        if failure.code in RETRIABLE_CODES and not (is_refusal and failure.code == RESOURCE_EXHAUSTED):
            delay_s = RETRY_DELAY_S * 2**sequence.num_resumes
            self._set_back(sequence, error, not_before=self._clock() + delay_s)
        else:
            self._finish(sequence, Ending(sampling_pb2.FINISH_REASON_ERROR, error))

    # The drafters' side, as far as the verifier is concerned.

    def forward_drafts(self, drafts: peer_pb2.DraftBatch) -> None:
        """Sends draft entries, with the verifier's epochs, on."""
        self._counters.num_draft_entries += len(drafts.sequence_ids)
        self.verifier.draft(drafts)

    # Policy and time.

    def accept_policy(self, policy: scheduler_pb2.SpeculationPolicy) -> None:
        """Puts the scheduler's policy in force everywhere."""
        self._policy.accept(policy)
        self._was_drafter_due = None
        self._send_policy()
        self.dispatcher.send_plan()

    def tick(self) -> None:
        """Runs a few times a second: second attempts, time-outs, and whether drafts are worth waiting for."""
        now = self._clock()
        for sequence in self.table:
            if sequence.state is ConductorSequenceState.PENDING:
                self._reopen_due(sequence, now)
            elif sequence.state is ConductorSequenceState.RUNNING:
                self.dispatcher.retry(sequence, now)
        self._send_policy()

    def _reopen_due(self, sequence: Sequence, now: float) -> None:
        if now - sequence.pending_since > self._patience.resume_timeout_s:
            error = UnavailableError(
                f"no verifier for {self._patience.resume_timeout_s:g} s: {self.verifier.last_reason}"
            )
            self._finish(sequence, Ending(sampling_pb2.FINISH_REASON_ERROR, error))
        elif (
            sequence.state is ConductorSequenceState.PENDING
            and self.verifier.is_up
            and now >= sequence.not_before
        ):
            self._open(sequence)

    def _send_policy(self) -> None:
        """Tells the verifier the policy; without a drafter that answers, it must not hold steps."""
        is_colocated = self._placement() == "colocated"
        is_due = is_colocated or self.dispatcher.is_any_answering
        if is_due != self._was_drafter_due and self.verifier.is_up:
            self._was_drafter_due = is_due
            self.verifier.set_policy(
                self._policy.verify_policy(is_colocated=is_colocated, is_drafter_due=is_due)
            )

    # Ends.

    def _set_back(self, sequence: Sequence, error: PacelineError, not_before: float) -> None:
        """Back to waiting for a verifier, with a new epoch; a request that was set back too often ends."""
        self.dispatcher.detach(sequence)
        self.table.forget_id(sequence)
        if sequence.num_resumes >= self._patience.max_resumes:
            self._finish(sequence, Ending(sampling_pb2.FINISH_REASON_ERROR, error))
            return
        sequence.move_to(ConductorSequenceState.PENDING)
        sequence.num_resumes += 1
        sequence.epoch += 1
        sequence.pending_since = self._clock()
        sequence.not_before = not_before
        self._counters.num_resumes += 1

    def _finish(self, sequence: Sequence, ending: Ending) -> None:
        self.dispatcher.detach(sequence)
        sequence.move_to(ConductorSequenceState.FINISHED)
        self.table.remove(sequence)
        self._commit_log.close(sequence.entry.request_id)
        self._counters.finished[ending.finish_reason] += 1
        if sequence.tenant:
            self._reports.ended(sequence.tenant, sequence.stats())
        sequence.output_queue.end(ending)
        sequence.output_queue.wake()
