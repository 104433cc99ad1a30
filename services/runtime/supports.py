"""The distributions of drawn draft tokens on the wire.

Responsible for: packing them with a batch's entries, and reading them from an untrusted peer. A wrong distribution
drops its entry. Arrays that disagree drop all entries with distributions.

Deliberately does not know: sequences, epochs, modes.

Called by: services.runtime.frames, for batches with drawn entries alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from paceline.contract.limits import MAX_SUPPORT_CONFIDENCE, MAX_SUPPORT_TOKENS
from paceline.drafts import DraftEntry, DrawRule, SiblingDraws
from paceline.sampling.distribution import MAX_WEIGHT, DraftDistribution
from paceline.v1 import peer_pb2

_WIRE_RULES = {
    DrawRule.WITH_REPLACEMENT: peer_pb2.DRAFT_DRAW_WITH_REPLACEMENT,
    DrawRule.WITHOUT_REPLACEMENT: peer_pb2.DRAFT_DRAW_WITHOUT_REPLACEMENT,
}
_RULES = {value: rule for rule, value in _WIRE_RULES.items()}


def pack_supports(batch: peer_pb2.DraftBatch, entries: Sequence[DraftEntry]) -> None:
    """Add the distributions of a batch's entries. An entry with a token that was not drawn is sent as not drawn.

    Raises:
        ValueError: a distribution has no integer weights, so that it cannot be sent.
    """
    weights = bytearray()
    for entry in entries:
        groups = _groups(entry)
        batch.num_supports.append(len(groups))
        batch.draws.append(_WIRE_RULES[groups[0].rule] if groups else peer_pb2.DRAFT_DRAW_UNSPECIFIED)
        for group in groups:
            dist = group.distribution
            if not isinstance(dist, DraftDistribution) or dist.weights is None:
                raise ValueError("only a distribution with weights in whole numbers can be sent")
            batch.support_sizes.append(dist.token_ids.numel())
            batch.support_tokens.extend(dist.token_ids.tolist())
            weights += dist.weights.numpy().astype("<u2").tobytes()
            said = group.confidence
            batch.support_confidences.append(
                0 if said is None else max(1, round(MAX_SUPPORT_CONFIDENCE * said))
            )
    batch.support_weights = bytes(weights)
    if not any(batch.support_confidences):
        batch.ClearField("support_confidences")


def _groups(entry: DraftEntry) -> list[SiblingDraws]:
    """The sibling groups in order of their first members; none unless every token was drawn, all by one rule."""
    groups: dict[int, SiblingDraws] = {}  # parent -> its children
    for parent, draws in zip(entry.parents, entry.draft_dists or (), strict=False):
        if draws is None:
            return []
        groups.setdefault(parent, draws)
    if len({group.rule for group in groups.values()}) > 1:
        return []
    return list(groups.values())


class SupportReader:
    """Reads the distributions of one batch, entry by entry."""

    def __init__(self, batch: peer_pb2.DraftBatch, vocab_size: int) -> None:
        num_entries = len(batch.sequence_ids)
        self._vocab_size = vocab_size
        self._draws = list(batch.draws)
        num_supports = np.fromiter(batch.num_supports, dtype=np.int64, count=len(batch.num_supports))
        sizes = np.fromiter(batch.support_sizes, dtype=np.int64, count=len(batch.support_sizes))
        self._tokens = np.fromiter(batch.support_tokens, dtype=np.int64, count=len(batch.support_tokens))
        num_weights, rest = divmod(len(batch.support_weights), 2)
        self.is_readable = (
            len(num_supports) == len(self._draws) == num_entries
            and int(num_supports.sum()) == len(sizes)
            and len(batch.support_confidences) in (0, len(sizes))
            and int(sizes.sum()) == len(self._tokens) == num_weights
            and rest == 0
        )
        if self.is_readable:
            self._weights = np.frombuffer(batch.support_weights, dtype="<u2").astype(np.int64)
            self._confidences = list(batch.support_confidences) or [0] * len(sizes)
            self._ends = np.cumsum(num_supports).tolist()
            self._bounds = [0, *np.cumsum(sizes).tolist()]
            self._firsts = [end - count for end, count in zip(self._ends, num_supports.tolist(), strict=True)]

    def drawn(self, index: int, entry: DraftEntry) -> DraftEntry | None:
        """Entry ``index`` of the batch with the distributions of its tokens; None where they are wrong.

        Checked: the rule is known; each token with children has one distribution; a distribution has 1 to
        `MAX_SUPPORT_TOKENS` distinct ids below the vocabulary size, with weights above 0; it can give every token that
        was drawn from it; siblings drawn without replacement differ; a confidence is at most `MAX_SUPPORT_CONFIDENCE`.
        """
        if not self.is_readable:
            return None
        first, end = self._firsts[index], self._ends[index]
        if self._draws[index] == peer_pb2.DRAFT_DRAW_UNSPECIFIED:
            return entry if first == end else None
        rule = _RULES.get(self._draws[index])
        parents = list(dict.fromkeys(entry.parents))
        if rule is None or len(parents) != end - first:
            return None
        groups: dict[int, SiblingDraws] = {}
        for parent, place in zip(parents, range(first, end), strict=True):
            dist = self._distribution(place)
            tokens = tuple(token for token, p in zip(entry.tokens, entry.parents, strict=True) if p == parent)
            said = self._confidences[place]
            if (
                dist is None
                or said > MAX_SUPPORT_CONFIDENCE
                or not set(tokens) <= set(dist.token_ids.tolist())
            ):
                return None
            if rule is DrawRule.WITHOUT_REPLACEMENT and len(set(tokens)) < len(tokens):
                return None
            groups[parent] = SiblingDraws(tokens, rule, dist, said / MAX_SUPPORT_CONFIDENCE if said else None)
        return replace(entry, draft_dists=tuple(groups[parent] for parent in entry.parents))

    def _distribution(self, place: int) -> DraftDistribution | None:
        begin, end = self._bounds[place], self._bounds[place + 1]
        ids, weights = self._tokens[begin:end], self._weights[begin:end]
        if not 1 <= len(ids) <= MAX_SUPPORT_TOKENS or len(np.unique(ids)) < len(ids):
            return None
        if int(ids.max()) >= self._vocab_size or int(weights.min()) < 1:
            return None
        assert int(weights.max()) <= MAX_WEIGHT, "16 bits"
        return DraftDistribution.of_weights(torch.from_numpy(ids.copy()), torch.from_numpy(weights.copy()))
