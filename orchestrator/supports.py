"""What drafted tokens were drawn from, in a batch that loses some of its entries on the way.

Responsible for: copying the distributions of the entries that stay. Deliberately does not know whether they are
right: the verifier checks them. Called by orchestrator.drafting.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.v1 import peer_pb2


def copy_supports(batch: peer_pb2.DraftBatch, kept: Sequence[int], into: peer_pb2.DraftBatch) -> bool:
    """Copy the distributions of some entries, whose other fields are copied already.

    Args:
        batch: as it came from a peer.
        kept: indices of the entries, rising.
        into: gets theirs.

    Returns:
        Whether the arrays agree; nothing is copied otherwise.
    """
    num_supports, sizes = list(batch.num_supports), list(batch.support_sizes)
    num_tokens = len(batch.support_tokens)
    if (
        not len(num_supports) == len(batch.draws) == len(batch.sequence_ids)
        or sum(num_supports) != len(sizes)
        or sum(sizes) != num_tokens
        or len(batch.support_weights) != 2 * num_tokens
    ):
        return False
    weights = bytearray()
    wanted, support, offset = set(kept), 0, 0
    for index, count in enumerate(num_supports):
        span = sizes[support : support + count]
        end = offset + sum(span)
        if index in wanted:
            into.draws.append(batch.draws[index])
            into.num_supports.append(count)
            into.support_sizes.extend(span)
            into.support_tokens.extend(batch.support_tokens[offset:end])
            weights += batch.support_weights[2 * offset : 2 * end]
        support, offset = support + count, end
    into.support_weights = bytes(weights)
    return True
