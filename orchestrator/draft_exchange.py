"""What the conductor and its drafters exchange for sequences that drafters have open: commits out, drafts in.

Responsible for: packing new tokens into one commit batch per drafter with the drafter's epochs, and sending a drafter's
drafts to the verifier with the verifier's epochs. Deliberately does not know which drafter gets which sequence. Called
by orchestrator.draft_dispatcher.
"""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.counters import Counters
from orchestrator.draft_batches import arrays_agree, with_epochs
from orchestrator.drafter_link import DrafterLink
from orchestrator.sequences import ConductorSequences, Sequence
from orchestrator.verifier_link import VerifierLink
from paceline.v1 import peer_pb2


class DraftExchange:
    """Commits to drafters, drafts to the verifier."""

    def __init__(self, sequences: ConductorSequences, verifier: VerifierLink, counters: Counters) -> None:
        self._sequences = sequences
        self._verifier = verifier
        self._counters = counters

    def send_commits(self, sequences: Iterable[Sequence]) -> None:
        """Sends each drafter the tokens of its sequences that it does not have yet, in one batch per drafter."""
        batches: dict[DrafterLink, peer_pb2.CommitBatch] = {}
        for sequence in sequences:
            for attachment in sequence.drafting.attachments.values():
                start = attachment.num_sent_tokens
                tokens = sequence.commit_log.tokens[start:]
                batch = batches.get(attachment.link)
                if batch is None:
                    batch = batches[attachment.link] = peer_pb2.CommitBatch()
                batch.sequence_ids.append(sequence.sequence_id)
                batch.epochs.append(attachment.epoch)
                batch.starts.append(start)
                batch.sizes.append(len(tokens))
                batch.tokens.extend(tokens)
                attachment.num_sent_tokens += len(tokens)
        for link, batch in batches.items():
            link.commit(batch)

    def forward_drafts(self, link: DrafterLink, drafts: peer_pb2.DraftBatch) -> None:
        """Sends drafts to the verifier; drops entries of old epochs here. The verifier checks the rest.

        Args:
            link: the drafter.
            drafts: its batch; may be changed.
        """
        num_entries = len(drafts.sequence_ids)
        if not arrays_agree(drafts):
            self._counters.num_malformed_drafts += max(num_entries, 1)
            return
        epochs = [
            self._verifier_epoch(link, sequence_id, epoch)
            for sequence_id, epoch in zip(drafts.sequence_ids, drafts.epochs, strict=True)
        ]
        num_stale = epochs.count(None)
        self._counters.num_stale_drafts += num_stale
        if num_stale < num_entries:
            self._counters.num_draft_entries += num_entries - num_stale
            self._verifier.draft(with_epochs(drafts, epochs))

    def _verifier_epoch(self, link: DrafterLink, sequence_id: int, epoch: int) -> int | None:
        """The verifier's epoch for a draft in the drafter's current epoch; None for a stale draft."""
        sequence = self._sequences.by_id(sequence_id)
        attachment = None if sequence is None else sequence.drafting.at(link)
        if sequence is None or attachment is None or attachment.epoch != epoch:
            return None
        sequence.drafting.num_reopens = 0
        return sequence.epoch
