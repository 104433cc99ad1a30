"""KV slots of sequences: where each slot comes from and where it goes.

Responsible for: giving a sequence a slot that already holds its shared prefix, keeping the slots of ended sequences as
prefixes, and evicting kept prefixes when memory is needed.

Deliberately does not know: which sequence should run; `table.py` decides that.

Called by: the table of sequences and the step loop, on the loop's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.target import KeptPrefix, KVCacheFullError, PrefixCache, TargetEngine, common_prefix
from paceline.target.kv.cache import capacity_class
from paceline.target.kv.prefix_cache import MIN_PREFIX_TOKENS
from services.verifier.feature_hub import FeatureHub
from services.verifier.sequence import NO_SLOT, TargetSequence

GROWTH_TOKENS = 256
"""Generated tokens that fit into a new slot; later tokens make the slot grow."""


@dataclass(slots=True)
class KVAllocatorStats:
    """What happened since the last step.

    Attributes:
        num_looked_up_tokens: tokens of sequences that may share a prefix.
        num_reused_tokens: tokens that did not have to be run, because a prefix held them.
        num_adopted: sequences that took over a kept slot.
        num_copied: sequences that started from a copy of another slot's rows.
        num_preemptions: sequences that lost their slot to older ones.
    """

    num_looked_up_tokens: int = 0
    num_reused_tokens: int = 0
    num_adopted: int = 0
    num_copied: int = 0
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """What a new slot starts from: the first rows of a kept prefix or of a running sequence's slot."""

    num_shared: int
    kept: KeptPrefix | None = None
    running: TargetSequence | None = None

    @property
    def is_whole(self) -> bool:
        """True where all rows of a kept slot are shared, so that the slot can be taken over without a copy."""
        return self.kept is not None and self.num_shared == len(self.kept.tokens)


class KVAllocator:
    """Gives out the slots of one engine.

    Args:
        engine: owns the slots.
        features: holds the features of a prefix.
        prefix_bytes: most bytes of kept prefixes; 0 turns prefix sharing off.
    """

    def __init__(self, engine: TargetEngine, features: FeatureHub, prefix_bytes: int) -> None:
        self._engine = engine
        self._features = features
        self._prefixes = PrefixCache(engine, prefix_bytes)
        self.shares_prefixes = prefix_bytes > 0
        self._stats = KVAllocatorStats()

    @property
    def num_kept(self) -> int:
        """Kept prefixes."""
        return len(self._prefixes)

    def can_hold(self, num_tokens: int) -> bool:
        """Whether a sequence of so many tokens fits into an empty cache."""
        cache = self._engine.cache
        num_bytes = capacity_class(num_tokens) * cache.layout.bytes_per_token
        return cache.limit_bytes is None or num_bytes <= cache.limit_bytes

    def take(self, sequence: TargetSequence, running: Sequence[TargetSequence]) -> bool:
        """Give a sequence a slot with its shared prefix in it; False where there is no memory now.

        Kept prefixes are evicted where necessary. Features of the shared prefix are added to the sequence's log.

        Args:
            sequence: has no slot.
            running: the sequences that have one. Without any, a slot for the committed text alone will do.
        """
        source = self._find(sequence, running)
        length = len(sequence.committed)
        wanted = length + min(sequence.num_tokens_left, GROWTH_TOKENS)
        slot = self._open(wanted, source)
        if slot is None and not running:
            source = None  # all prefixes were evicted
            slot = self._open(length, source)
        if slot is None:
            return False
        sequence.slot = slot
        sequence.num_cached = 0 if source is None else source.num_shared
        if source is not None and (rows := self._features_of(source)) is not None:
            self._features.append(sequence.sequence_id, 0, rows)
        if self.shares_prefixes and sequence.spec.may_share_prefix:
            self._stats.num_looked_up_tokens += length
            self._stats.num_reused_tokens += sequence.num_cached
        return True

    def release(self, sequence: TargetSequence, *, keep: bool) -> None:
        """Take a sequence's slot back; with `keep`, its rows may serve as a prefix for others."""
        if sequence.slot == NO_SLOT:
            return
        slot, sequence.slot = sequence.slot, NO_SLOT
        # A stop token inside an accepted draft leaves more rows than text.
        num_rows = min(sequence.num_cached, len(sequence.committed))
        sequence.num_cached = 0
        if keep and self.shares_prefixes:
            features = self._features.kept(sequence.sequence_id, num_rows)
            self._prefixes.keep(slot, sequence.committed[:num_rows], features)
        else:
            self._engine.close(slot)

    def evict(self) -> bool:
        """Evict the least recently used prefix; False where there is none."""
        return self._prefixes.evict()

    def note_preemption(self) -> None:
        """Count a sequence that lost its slot to older ones."""
        self._stats.num_preemptions += 1

    def take_stats(self) -> KVAllocatorStats:
        """What happened since the last call."""
        stats, self._stats = self._stats, KVAllocatorStats()
        return stats

    def _find(self, sequence: TargetSequence, running: Sequence[TargetSequence]) -> PrefixSource | None:
        """The slot that shares the longest prefix of a sequence's text; the last token must always be run."""
        if not self.shares_prefixes or not sequence.spec.may_share_prefix:
            return None
        limit = len(sequence.committed) - 1
        # Most drafters read the features of every position; the drafter of a preempted sequence has them already.
        needs_features = (
            sequence.may_be_read
            and any(not tap.last_only for tap in self._engine.taps)
            and self._features.length(sequence.sequence_id) < limit
        )
        best: PrefixSource | None = None
        found = self._prefixes.find(sequence.committed, limit, needs_features=needs_features)
        if found is not None:
            best = PrefixSource(found[1], kept=found[0])
        for other in running:
            if needs_features and self._features.length(other.sequence_id) < other.num_cached:
                continue
            shared = common_prefix(other.committed, sequence.committed, min(limit, other.num_cached))
            if shared >= MIN_PREFIX_TOKENS and (best is None or shared > best.num_shared):
                best = PrefixSource(shared, running=other)
        return best

    def _features_of(self, source: PrefixSource) -> Tensor | None:
        """Features `[num_shared, width]` of the source's rows; None where it has none."""
        if source.running is not None:
            return self._features.first(source.running.sequence_id, source.num_shared)
        assert source.kept is not None
        return None if source.kept.features is None else source.kept.features(source.num_shared)

    def _open(self, capacity_tokens: int, source: PrefixSource | None) -> int | None:
        """A slot that starts with the source's rows; evicts kept prefixes, and is None without enough memory."""
        kept = None if source is None else source.kept
        while True:
            try:
                return self._slot(capacity_tokens, source)
            except KVCacheFullError:
                if self._prefixes.evict(spared=kept):
                    continue
                if kept is None or source is None:
                    return None
                # There is no memory for a copy, so that the sequence takes over the prefix itself.
                slot = self._prefixes.take(kept)
                self._stats.num_adopted += 1
                self._engine.truncate(slot, source.num_shared)
                return slot

    def _slot(self, capacity_tokens: int, source: PrefixSource | None) -> int:
        """A slot that starts with the source's rows.

        Raises:
            KVCacheFullError: there is not enough memory; nothing was changed.
        """
        if source is None:
            return self._engine.open(capacity_tokens)
        if source.kept is None:
            assert source.running is not None
            slot = self._engine.fork(source.running.slot, source.num_shared, capacity_tokens)
        elif source.is_whole:
            self._stats.num_adopted += 1
            return self._prefixes.take(source.kept)
        else:
            slot = self._engine.fork(source.kept.slot, source.num_shared, capacity_tokens)
            self._prefixes.touch(source.kept)
        self._stats.num_copied += 1
        return slot
