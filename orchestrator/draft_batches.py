"""Draft batches on their way from a drafter to the verifier: checked, addressed again, joined.

Responsible for: the packed arrays of a batch that must stay in step with one another. Deliberately does not know
whether a draft is right: the verifier checks that. Called by: orchestrator.draft_dispatcher (drafter's epochs in,
verifier's epochs out) and orchestrator.verifier_link (joins batches that wait for the stream).
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.supports import copy_supports, has_supports, join_supports, supports_agree
from paceline.v1 import peer_pb2


def arrays_agree(batch: peer_pb2.DraftBatch) -> bool:
    """Whether the arrays of a batch have the lengths they must have."""
    num_entries = len(batch.sequence_ids)
    return (
        len(batch.epochs) == len(batch.starts) == len(batch.sizes) == num_entries
        and sum(batch.sizes) == len(batch.tokens) == len(batch.parents)
        and supports_agree(batch)
    )


def with_epochs(batch: peer_pb2.DraftBatch, epochs: Sequence[int | None]) -> peer_pb2.DraftBatch:
    """The entries of a batch in other epochs.

    Args:
        batch: one whose arrays agree; it is changed where all of its entries stay.
        epochs: the new epoch of each entry; None drops the entry.
    """
    has_log_probs = len(batch.log_probs) == len(batch.tokens)
    if None not in epochs:  # the usual case: nothing is copied
        del batch.epochs[:]
        batch.epochs.extend(epoch for epoch in epochs if epoch is not None)
        if not has_log_probs:
            del batch.log_probs[:]
        return batch
    kept = peer_pb2.DraftBatch()
    if has_supports(batch):
        copy_supports(batch, [i for i, epoch in enumerate(epochs) if epoch is not None], kept)
    offset = 0
    for i, epoch in enumerate(epochs):
        size = batch.sizes[i]
        span = slice(offset, offset + size)
        offset += size
        if epoch is None:
            continue
        kept.sequence_ids.append(batch.sequence_ids[i])
        kept.epochs.append(epoch)
        kept.starts.append(batch.starts[i])
        kept.sizes.append(size)
        kept.tokens.extend(batch.tokens[span])
        kept.parents.extend(batch.parents[span])
        if has_log_probs:
            kept.log_probs.extend(batch.log_probs[span])
    return kept


def join_drafts(batch: peer_pb2.DraftBatch, more: peer_pb2.DraftBatch) -> None:
    """Appends a batch to another, and leaves `more` as it is.

    A batch has log-probs for all of its tokens or for none, and the same holds for distributions.
    """
    drops_log_probs = bool(batch.log_probs) != bool(more.log_probs) and batch.tokens and more.tokens
    if drops_log_probs or has_supports(batch) or has_supports(more):
        more = peer_pb2.DraftBatch.FromString(more.SerializeToString())
    if drops_log_probs:
        del batch.log_probs[:]
        del more.log_probs[:]
    join_supports(batch, more)
    batch.MergeFrom(more)
