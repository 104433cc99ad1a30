"""The drafters' side of the cycles: which drafter has which sequence, and in which epoch.

Responsible for: opening running sequences at drafters and at new ones when a drafter is lost, forwarding commits with
the drafter's epochs, and turning a drafter's answers into drafts with the verifier's epochs. Deliberately does not
know requests' readers. Called by orchestrator.cycles and by the drafter links; never awaits.

Epochs at drafters come from one rising count per conductor, so an answer that belongs to an earlier opening, at this
drafter or another, can always be told.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import structlog

from orchestrator.counters import Counters
from orchestrator.drafter_link import DrafterLink
from orchestrator.faults import DRAFTING_ENDS, RETRY_DELAY_S
from orchestrator.placement import DrafterRequirement, can_do, check_drafter, choose_drafter
from orchestrator.policy import PolicyInForce
from orchestrator.reports import Reports
from orchestrator.sequences import Attachment, ConductorSequences, ConductorSequenceState, Sequence
from orchestrator.supports import copy_supports, has_supports, supports_agree
from orchestrator.verifier_link import VerifierLink
from paceline.contract.errors import IncompatiblePeerError, UnavailableError
from paceline.v1 import drafter_pb2, peer_pb2

MAX_REOPENS_IN_A_ROW = 8

log = structlog.get_logger()


class DraftDispatcher:
    """All drafters of one conductor.

    Attributes:
        links: one per drafter; empty where drafting is colocated or off.
    """

    def __init__(
        self,
        *,
        table: ConductorSequences,
        verifier: VerifierLink,
        policy: PolicyInForce,
        reports: Reports,
        counters: Counters,
        forward_drafts: Callable[[peer_pb2.DraftBatch], None],
        clock: Callable[[], float],
        drafters_per_sequence: int = 1,
    ) -> None:
        self.links: tuple[DrafterLink, ...] = ()
        self._table = table
        self._verifier = verifier
        self._policy = policy
        self._reports = reports
        self._counters = counters
        self._forward_drafts = forward_drafts
        self._clock = clock
        self._drafters_per_sequence = drafters_per_sequence
        self._epochs = itertools.count(1)

    @property
    def is_any_answering(self) -> bool:
        """Whether drafts can be expected at all."""
        return any(link.is_up and not link.is_stalled for link in self.links)

    def may_have(self, requirement: DrafterRequirement) -> bool:
        """Whether there may be such a drafter; one that has not been reached yet may be called and do anything."""
        if self.links:  # the verifier's own, if it has one, stands idle
            return any(link.info is None or requirement.is_met_by(link) for link in self.links)
        own = self._verifier.info
        return own is None or (
            bool(own.method)
            and requirement.name in ("", own.method)
            and can_do(own, requirement.reads_features)
        )

    # What the cycle does.

    def attach(self, sequence: Sequence) -> None:
        """Opens a running sequence at as many drafters as share its outcomes, as far as they are up; none while off."""
        drafting = sequence.drafting
        if drafting.is_off or self._verifier.info is None or not sequence.sequence_id:
            return
        if not self._policy.draft_length:
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
            self._open(sequence, Attachment(link, epoch, partition, len(sequence.entry.tokens)))

    def _open(self, sequence: Sequence, attachment: Attachment) -> None:
        link, verifier = attachment.link, self._verifier.info
        assert verifier is not None
        assert link.info is not None
        sequence.drafting.attachments[attachment.partition] = attachment
        self._counters.num_drafter_openings += 1
        wanted = sequence.drafting.requirement.reads_features
        reads_features = link.reads_features if wanted is None else wanted
        link.open(
            drafter_pb2.OpenDraftSequence(
                sequence_id=sequence.sequence_id,
                epoch=attachment.epoch,
                token_ids=sequence.entry.tokens,
                sampling=sequence.sampling,
                verifier_endpoint=self._verifier.feature_endpoint if reads_features else "",
                verifier_instance_id=verifier.instance_id,
                max_draft_tokens=sequence.max_draft_tokens,
                partition=attachment.partition,
                num_partitions=sequence.drafting.num_partitions,
                reads_features=wanted,
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
        """Opens a sequence that lacks a drafter again, once its pause is over."""
        drafting = sequence.drafting
        if drafting.missing_partitions and not drafting.is_off and now >= drafting.retry_at:
            self.attach(sequence)

    def forward(self, sequences: Iterable[Sequence]) -> None:
        """Sends what is new of some sequences to their drafters; each gets one batch, however many share a sequence.

        Nothing while drafting is off: once it is on, a sequence's next commit takes along what was held back.
        """
        if not self._policy.draft_length:
            return
        batches: dict[DrafterLink, peer_pb2.CommitBatch] = {}
        for sequence in sequences:
            for attachment in sequence.drafting.attachments.values():
                start, tokens = attachment.length, sequence.entry.tokens[attachment.length :]
                batch = batches.setdefault(attachment.link, peer_pb2.CommitBatch())
                batch.sequence_ids.append(sequence.sequence_id)
                batch.epochs.append(attachment.epoch)
                batch.starts.append(start)
                batch.sizes.append(len(tokens))
                batch.tokens.extend(tokens)
                attachment.length += len(tokens)
        for link, batch in batches.items():
            link.commit(batch)

    def send_plan(self) -> None:
        """Tells every drafter the plan in force, and opens what it may draft for."""
        plan = self._policy.draft_plan()
        for link in self.links:
            link.set_plan(plan)
        self._attach_all()

    def _attach_all(self) -> None:
        for sequence in self._table:
            if sequence.state is ConductorSequenceState.RUNNING and sequence.drafting.missing_partitions:
                self.attach(sequence)

    def verifier_up(self) -> None:
        """Lets go of drafters that do not belong to the target that is served now."""
        for link in self.links:
            if link.is_up and link.info is not None:
                try:
                    self.check_drafter(link.info)
                except IncompatiblePeerError as error:
                    link.drop(str(error))

    # What the links report.

    def check_drafter(self, info: peer_pb2.PeerInfo) -> None:
        """Compares a drafter with the target.

        Raises:
            IncompatiblePeerError: they do not belong together.
            UnavailableError: the target is not known yet.
        """
        if self._verifier.info is None:
            raise UnavailableError("the verifier has not been reached yet")
        check_drafter(info, self._verifier.info)

    def drafter_up(self, link: DrafterLink) -> None:
        """Opens running sequences that lack a drafter."""
        link.set_plan(self._policy.draft_plan())
        self._attach_all()

    def drafter_down(self, link: DrafterLink, reason: str) -> None:
        """Moves its sequences to other drafters, if there are any."""
        for sequence in self._table:
            attachment = sequence.drafting.at(link)
            if attachment is None:
                continue
            del sequence.drafting.attachments[attachment.partition]
            if attachment.partition == 0:
                # Drafts come first: whoever is left takes the shares anew, from this one on.
                self.detach(sequence)
            if sequence.state is ConductorSequenceState.RUNNING:
                self.attach(sequence)

    def drafter_frame(
        self, link: DrafterLink, frame: drafter_pb2.DraftResponse, round_trip_us: int | None
    ) -> None:
        """Forwards the drafts that still have a sequence, and notes what was measured."""
        drafts = self._translate(link, frame.drafts) if frame.HasField("drafts") else None
        if drafts is not None:
            self._forward_drafts(drafts)
        for failure in frame.failures:
            self._failed(link, failure)
        if round_trip_us is not None:
            self._counters.num_round_trips += 1
            self._counters.sum_round_trips_us += round_trip_us
        self._reports.draft(frame, round_trip_us, link.endpoint)

    def _translate(self, link: DrafterLink, drafts: peer_pb2.DraftBatch) -> peer_pb2.DraftBatch | None:
        """Puts the verifier's epochs in; entries of nobody are left out. The rest is for the verifier to check."""
        num_entries = len(drafts.sequence_ids)
        arrays_agree = len(drafts.epochs) == len(drafts.starts) == len(drafts.sizes) == num_entries
        tokens_agree = sum(drafts.sizes) == len(drafts.tokens) == len(drafts.parents)
        if not (arrays_agree and tokens_agree and supports_agree(drafts)):
            self._counters.num_malformed_drafts += max(num_entries, 1)
            return None
        has_log_probs = len(drafts.log_probs) == len(drafts.tokens)
        owners: list[Sequence | None] = []
        for sequence_id, epoch in zip(drafts.sequence_ids, drafts.epochs, strict=True):
            sequence = self._table.by_id(sequence_id)
            attachment = None if sequence is None else sequence.drafting.at(link)
            is_current = attachment is not None and attachment.epoch == epoch
            owners.append(sequence if is_current else None)
        current = [sequence for sequence in owners if sequence is not None]
        for sequence in current:
            sequence.drafting.num_reopens = 0
        self._counters.num_stale_drafts += num_entries - len(current)
        if not current:
            return None
        if len(current) == num_entries:  # the usual case: nothing is copied
            del drafts.epochs[:]
            drafts.epochs.extend(sequence.epoch for sequence in current)
            if not has_log_probs:
                del drafts.log_probs[:]
            return drafts
        kept = peer_pb2.DraftBatch()
        if has_supports(drafts):
            copy_supports(drafts, [i for i, sequence in enumerate(owners) if sequence is not None], kept)
        offset = 0
        for i, sequence in enumerate(owners):
            size = drafts.sizes[i]
            span = slice(offset, offset + size)
            offset += size
            if sequence is None:
                continue
            kept.sequence_ids.append(sequence.sequence_id)
            kept.epochs.append(sequence.epoch)
            kept.starts.append(drafts.starts[i])
            kept.sizes.append(size)
            kept.tokens.extend(drafts.tokens[span])
            kept.parents.extend(drafts.parents[span])
            if has_log_probs:
                kept.log_probs.extend(drafts.log_probs[span])
        return kept

    def _failed(self, link: DrafterLink, failure: peer_pb2.SequenceFailure) -> None:
        """A sequence failed at a drafter: its text goes on, and it is opened again where that may help."""
        sequence = self._table.by_id(failure.sequence_id)
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
            request_id=sequence.entry.request_id,
            drafter=link.endpoint,
            reason=failure.reason,
            message=failure.message,
            is_final=drafting.is_off,
        )
