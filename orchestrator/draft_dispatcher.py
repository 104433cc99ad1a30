"""The drafters of one conductor: which drafter has which sequence, and in which epoch.

Responsible for: opening running sequences at drafters, and at other drafters when one is lost. Deliberately does not
know the readers of requests, nor what commits and drafts say (orchestrator.draft_exchange). Called by
orchestrator.cycles, orchestrator.sequence_lifecycle, orchestrator.step_handler and by the drafter links; never awaits.

Epochs at drafters come from one rising count per conductor. So an answer to an earlier opening, at this drafter or at
another, always names an old epoch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import structlog

from orchestrator.counters import Counters
from orchestrator.draft_exchange import DraftExchange
from orchestrator.drafter_link import DrafterLink
from orchestrator.drafting import Attachment
from orchestrator.faults import RETRY_DELAY_S
from orchestrator.placement import DrafterRequirement, can_do, check_drafter, choose_drafter
from orchestrator.policy import PolicyInForce
from orchestrator.reports import Reports
from orchestrator.sequence_state import ConductorSequenceState
from orchestrator.sequences import ConductorSequences, Sequence
from orchestrator.verifier_link import VerifierLink
from paceline.contract.errors import IncompatiblePeerError, UnavailableError
from paceline.contract.failures import DRAFTING_ENDS
from paceline.v1 import drafter_pb2, generation_pb2, peer_pb2

MAX_REOPENS_IN_A_ROW = 8
"""A sequence whose openings fail more often in a row gets no drafter any more."""

log = structlog.get_logger()


class DraftDispatcher:
    """All drafters of one conductor.

    Args:
        sequences: the unfinished sequences.
        verifier: gets the drafts.
        policy: the policy in force.
        reports: measurements for the scheduler.
        counters: the conductor's.
        clock: loop time.
        drafters_per_sequence: drafters that draft ahead for one sequence, each for its own partition of the outcomes.

    Attributes:
        links: one per drafter; empty where drafting is colocated or off.
    """

    def __init__(
        self,
        *,
        sequences: ConductorSequences,
        verifier: VerifierLink,
        policy: PolicyInForce,
        reports: Reports,
        counters: Counters,
        clock: Callable[[], float],
        drafters_per_sequence: int = 1,
    ) -> None:
        self.links: tuple[DrafterLink, ...] = ()
        self._sequences = sequences
        self._verifier = verifier
        self._policy = policy
        self._exchange = DraftExchange(sequences, verifier, counters)
        self._reports = reports
        self._counters = counters
        self._clock = clock
        self._drafters_per_sequence = drafters_per_sequence
        self._epochs = itertools.count(1)

    @property
    def is_any_answering(self) -> bool:
        """Whether drafts can be expected at all."""
        return any(link.is_up and not link.is_stalled for link in self.links)

    def may_have(self, requirement: DrafterRequirement) -> bool:
        """Whether a drafter may meet a requirement; one that has not been reached yet may meet any."""
        if self.links:  # the verifier's own drafter, if it has one, is not used
            return any(link.info is None or requirement.is_met_by(link) for link in self.links)
        own = self._verifier.info
        return own is None or (
            bool(own.method)
            and requirement.name in ("", own.method)
            and can_do(own, requirement.reads_features)
        )

    def no_draft_reason(self, sequence: Sequence, *, is_colocated: bool) -> generation_pb2.NoDraftReason:
        """Why a step of a running sequence had no drafts.

        Args:
            sequence: the sequence.
            is_colocated: the verifier's own drafter is in use.
        """
        policy = self._policy.step
        if not sequence.max_draft_nodes:
            return generation_pb2.NO_DRAFT_REASON_REQUEST
        if not self.links and not is_colocated:
            return generation_pb2.NO_DRAFT_REASON_MISSING
        if not policy.draft_length or not policy.max_nodes_per_sequence:
            return generation_pb2.NO_DRAFT_REASON_POLICY
        if is_colocated or sequence.drafting.attachments:
            return generation_pb2.NO_DRAFT_REASON_LATE
        return generation_pb2.NO_DRAFT_REASON_MISSING

    # What the sequences need.

    def attach(self, sequence: Sequence) -> None:
        """Opens a running sequence at a drafter for each partition that lacks one; at none while drafting is off."""
        drafting = sequence.drafting
        if drafting.is_off or self._verifier.info is None or not sequence.sequence_id:
            return
        if not self._policy.step.draft_length:
            return
        if not drafting.attachments:
            able = sum(drafting.requirement.is_met_by(link) for link in self.links)
            drafting.num_partitions = max(1, min(self._drafters_per_sequence, able))
        for partition in drafting.missing_partitions:
            free = [link for link in self.links if drafting.at(link) is None]
            link = choose_drafter(free, drafting.requirement)
            if link is None or link.info is None:
                return
            epoch = next(self._epochs) & 0xFFFFFFFF
            self._open(sequence, Attachment(link, epoch, partition, len(sequence.commit_log.tokens)))

    def _open(self, sequence: Sequence, attachment: Attachment) -> None:
        link, verifier = attachment.link, self._verifier.info
        assert verifier is not None
        assert link.info is not None
        sequence.drafting.attachments[attachment.partition] = attachment
        self._counters.num_drafter_openings += 1
        asked = sequence.drafting.requirement.reads_features
        reads_features = link.reads_features if asked is None else asked
        link.open(
            drafter_pb2.OpenDraftSequence(
                sequence_id=sequence.sequence_id,
                epoch=attachment.epoch,
                token_ids=sequence.commit_log.tokens,
                sampling=sequence.sampling,
                verifier_endpoint=self._verifier.feature_endpoint if reads_features else "",
                verifier_instance_id=verifier.instance_id,
                max_draft_tokens=sequence.max_draft_tokens,
                partition=attachment.partition,
                num_partitions=sequence.drafting.num_partitions,
                reads_features=asked,
            )
        )
        if reads_features:
            self._verifier.attach(sequence.sequence_id, link.info.instance_id)

    def detach(self, sequence: Sequence) -> None:
        """Closes a sequence at its drafters."""
        attachments = list(sequence.drafting.attachments.values())
        sequence.drafting.attachments.clear()
        for attachment in attachments:
            attachment.link.close(sequence.sequence_id)

    def retry(self, sequence: Sequence, now: float) -> None:
        """Opens a sequence that lacks a drafter, once its pause is over."""
        drafting = sequence.drafting
        if drafting.missing_partitions and not drafting.is_off and now >= drafting.retry_at:
            self.attach(sequence)

    def forward(self, sequences: Iterable[Sequence]) -> None:
        """Sends the new tokens of some sequences to their drafters, in one batch per drafter.

        Sends nothing while drafting is off. Once it is on, a sequence's next commit carries the tokens that were kept
        back.
        """
        if self._policy.step.draft_length:
            self._exchange.send_commits(sequences)

    def send_policy(self) -> None:
        """Sends every drafter the policy in force, and opens the sequences that lack a drafter."""
        for link in self.links:
            link.set_policy(self._policy.step)
        self._attach_all()

    def _attach_all(self) -> None:
        for sequence in self._sequences:
            if sequence.state is ConductorSequenceState.RUNNING and sequence.drafting.missing_partitions:
                self.attach(sequence)

    def verifier_up(self) -> None:
        """Drops the drafters that were made for another target than the verifier now serves."""
        for link in self.links:
            if link.is_up and link.info is not None:
                try:
                    self.check_drafter(link.info)
                except IncompatiblePeerError as error:
                    link.drop(str(error))

    # The drafters' events.

    def check_drafter(self, info: peer_pb2.PeerInfo) -> None:
        """Refuses a drafter that was not made for the target.

        Raises:
            IncompatiblePeerError: it was made for another target.
            UnavailableError: the target is not known yet.
        """
        if self._verifier.info is None:
            raise UnavailableError("the verifier has not been reached yet")
        check_drafter(info, self._verifier.info)

    def drafter_up(self, link: DrafterLink) -> None:
        """Opens running sequences that lack a drafter."""
        link.set_policy(self._policy.step)
        self._attach_all()

    def drafter_down(self, link: DrafterLink, reason: str) -> None:
        """Moves the sequences of a lost drafter to other drafters, if there are any."""
        for sequence in self._sequences:
            attachment = sequence.drafting.at(link)
            if attachment is None:
                continue
            del sequence.drafting.attachments[attachment.partition]
            if attachment.partition == 0:
                # Drafts come first: the drafters that are left take the partitions anew, this one first.
                self.detach(sequence)
            if sequence.state is ConductorSequenceState.RUNNING:
                self.attach(sequence)

    def drafter_frame(
        self, link: DrafterLink, frame: drafter_pb2.DraftResponse, round_trip_us: int | None
    ) -> None:
        """Forwards the drafts of current sequences, and reports what was measured."""
        if frame.HasField("drafts"):
            self._exchange.forward_drafts(link, frame.drafts)
        for failure in frame.failures:
            self._failed(link, failure)
        if round_trip_us is not None:
            self._counters.num_round_trips += 1
            self._counters.sum_round_trips_us += round_trip_us
        self._reports.draft(frame, round_trip_us, link.endpoint)

    def _failed(self, link: DrafterLink, failure: peer_pb2.SequenceFailure) -> None:
        """A sequence failed at a drafter: its text continues, and it is opened again where that may help."""
        sequence = self._sequences.by_id(failure.sequence_id)
        attachment = None if sequence is None else sequence.drafting.at(link)
        if sequence is None or attachment is None:
            return
        self._counters.num_drafter_failures += 1
        drafting = sequence.drafting
        del drafting.attachments[attachment.partition]
        link.close(sequence.sequence_id)
        drafting.num_reopens += 1
        drafting.is_off = failure.reason in DRAFTING_ENDS or drafting.num_reopens > MAX_REOPENS_IN_A_ROW
        drafting.retry_at = self._clock() + RETRY_DELAY_S * 2**drafting.num_reopens
        if drafting.is_off:
            self.detach(sequence)
        log.info(
            "sequence failed at a drafter",
            request_id=sequence.request_id,
            drafter=link.endpoint,
            reason=failure.reason,
            message=failure.message,
            is_final=drafting.is_off,
        )
