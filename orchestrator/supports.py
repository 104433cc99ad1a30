"""What drafted tokens were drawn from, in batches that are joined or lose entries on their way to the verifier.

Responsible for: keeping the arrays of distributions in step with the entries. Deliberately does not know whether a
distribution is right: the verifier checks that. Called by orchestrator.draft_dispatcher and orchestrator.verifier_link.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.v1 import peer_pb2


def has_supports(batch: peer_pb2.DraftBatch) -> bool:
    """Whether anything in a batch was drawn."""
    return bool(batch.draws or batch.num_supports)


def supports_agree(batch: peer_pb2.DraftBatch) -> bool:
    """Whether the arrays of distributions fit one another and the entries; a batch that has none fits."""
    arrays = (batch.support_sizes, batch.support_tokens, batch.support_weights, batch.support_confidences)
    if not has_supports(batch) and not any(arrays):
        return True
    return (
        len(batch.num_supports) == len(batch.draws) == len(batch.sequence_ids)
        and sum(batch.num_supports) == len(batch.support_sizes)
        and len(batch.support_confidences) in (0, len(batch.support_sizes))
        and sum(batch.support_sizes) == len(batch.support_tokens)
        and len(batch.support_weights) == 2 * len(batch.support_tokens)
    )


def copy_supports(batch: peer_pb2.DraftBatch, kept: Sequence[int], into: peer_pb2.DraftBatch) -> None:
    """Copy the distributions of some entries, whose other fields are copied already.

    Args:
        batch: one whose arrays agree.
        kept: indices of the entries, rising.
        into: gets theirs.
    """
    sizes, weights = list(batch.support_sizes), bytearray()
    confidences = _confidences(batch)
    wanted, support, offset = set(kept), 0, 0
    for index, count in enumerate(batch.num_supports):
        span = sizes[support : support + count]
        end = offset + sum(span)
        if index in wanted:
            into.draws.append(batch.draws[index])
            into.num_supports.append(count)
            into.support_sizes.extend(span)
            into.support_tokens.extend(batch.support_tokens[offset:end])
            into.support_confidences.extend(confidences[support : support + count])
            weights += batch.support_weights[2 * offset : 2 * end]
        support, offset = support + count, end
    into.support_weights = bytes(weights)
    if not any(into.support_confidences):
        into.ClearField("support_confidences")


def join_supports(batch: peer_pb2.DraftBatch, more: peer_pb2.DraftBatch) -> None:
    """Prepare two batches for `MergeFrom`: where one has distributions, the other's entries say that they have none.

    Args:
        batch: gets the weights of both at once, which MergeFrom would overwrite.
        more: one that may be changed; is left without weights.
    """
    if not (has_supports(batch) or has_supports(more)):
        return
    for part in (batch, more):
        if not has_supports(part):
            part.draws.extend([peer_pb2.DRAFT_DRAW_UNSPECIFIED] * len(part.sequence_ids))
            part.num_supports.extend([0] * len(part.sequence_ids))
    if batch.support_confidences or more.support_confidences:
        for part in (batch, more):
            if not part.support_confidences:
                part.support_confidences.extend(_confidences(part))
    batch.support_weights += more.support_weights
    more.ClearField("support_weights")


def _confidences(batch: peer_pb2.DraftBatch) -> list[int]:
    """Of each distribution, 0 for all where the drafter sent none."""
    return list(batch.support_confidences) or [0] * len(batch.support_sizes)
