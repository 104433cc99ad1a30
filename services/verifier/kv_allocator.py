"""KVAllocator in the key-value cache: where each sequence's slot comes from and where it goes.

Responsible for giving a sequence a slot, with as much of its text already in it as a kept prefix or a running
sequence shares with it, for keeping the slots of ended ones, and for giving kept ones up when room is needed. It does
not know whose turn it is: `table.py` decides who runs and who waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.target import KeptPrefix, KVCacheFullError, PrefixCache, TargetEngine, common_prefix
from paceline.target.kv_cache import capacity_class
from paceline.target.prefix_cache import MIN_PREFIX_TOKENS
from services.verifier.feature_hub import FeatureHub
from services.verifier.sequence import NO_SLOT, TargetSequence

GROWTH_TOKENS = 256
"""Generated tokens that a new slot has room for; later ones make it grow."""


@dataclass(slots=True)
class KVAllocatorStats:
    """What happened since the last report.

    Attributes:
        num_looked_up_tokens: tokens of sequences that looked for a shared prefix.
        num_reused_tokens: those of them that did not have to be run.
        num_adopted: sequences that went on in a kept slot.
        num_copied: sequences that started from a copy of a kept or running one's rows.
        num_preemptions: sequences that lost their slot to older ones.
    """

    num_looked_up_tokens: int = 0
    num_reused_tokens: int = 0
    num_adopted: int = 0
    num_copied: int = 0
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Source:
    """What a new slot starts from: a kept prefix or a running sequence's slot, and how many rows of it."""

    num_shared: int
    kept: KeptPrefix | None = None
    running: TargetSequence | None = None

    @property
    def is_whole(self) -> bool:
        """True where all of a kept slot is of use, so that it can be had without copying it."""
        return self.kept is not None and self.num_shared == len(self.kept.tokens)


class KVAllocator:
    """Gives out slots of one engine.

    Args:
        engine: owns the slots.
        features: logs that a prefix's features come from.
        prefix_bytes: most bytes of kept prefixes; 0 turns the sharing of prefixes off.
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
        """Whether a sequence of so many tokens fits when nothing else is there."""
        cache = self._engine.cache
        num_bytes = capacity_class(num_tokens) * cache.layout.bytes_per_token
        return cache.limit_bytes is None or num_bytes <= cache.limit_bytes

    def take(self, sequence: TargetSequence, running: Sequence[TargetSequence]) -> bool:
        """Give a sequence a slot, with its shared prefix in it; False where there is no room now.

        Kept prefixes are given up for it. Features of the prefix that its log lacks are appended there.

        Args:
            sequence: without a slot.
            running: the sequences that have one. Where there are none, the slot need not have room to grow.
        """
        source = self._find(sequence, running)
        length = len(sequence.committed)
        wanted = length + min(sequence.num_tokens_left, GROWTH_TOKENS)
        slot = self._open(wanted, source)
        if slot is None and not running:
            source = None  # there is nothing left to start from
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
        """Take a sequence's slot back, and keep what is in it for others where asked to."""
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
        """Give up the kept prefix that was of use least recently; False where there is none."""
        return self._prefixes.evict()

    def note_preemption(self) -> None:
        """Count a sequence that lost its slot to older ones."""
        self._stats.num_preemptions += 1

    def take_stats(self) -> KVAllocatorStats:
        """What happened since the last call."""
        stats, self._stats = self._stats, KVAllocatorStats()
        return stats

    def _find(self, sequence: TargetSequence, running: Sequence[TargetSequence]) -> Source | None:
        """The longest prefix of a sequence's text that is in a slot, less its last token, which must be run."""
        if not self.shares_prefixes or not sequence.spec.may_share_prefix:
            return None
        limit = len(sequence.committed) - 1
        # Most drafters read the features of every position; that of a sequence that was preempted has had them.
        needs_features = (
            sequence.may_be_read
            and any(not tap.last_only for tap in self._engine.taps)
            and self._features.length(sequence.sequence_id) < limit
        )
        best: Source | None = None
        found = self._prefixes.find(sequence.committed, limit, needs_features=needs_features)
        if found is not None:
            best = Source(found[1], kept=found[0])
        for other in running:
            if needs_features and self._features.length(other.sequence_id) < other.num_cached:
                continue
            shared = common_prefix(other.committed, sequence.committed, min(limit, other.num_cached))
            if shared >= MIN_PREFIX_TOKENS and (best is None or shared > best.num_shared):
                best = Source(shared, running=other)
        return best

    def _features_of(self, source: Source) -> Tensor | None:
        """Features `[num_shared, width]` of a source's rows; None where it has none."""
        if source.running is not None:
            return self._features.first(source.running.sequence_id, source.num_shared)
        assert source.kept is not None
        return None if source.kept.features is None else source.kept.features(source.num_shared)

    def _open(self, capacity_tokens: int, source: Source | None) -> int | None:
        """A slot that starts with the source's rows, at the expense of kept prefixes; None where there is no room."""
        kept = None if source is None else source.kept
        while True:
            try:
                return self._slot(capacity_tokens, source)
            except KVCacheFullError:
                if self._prefixes.evict(spared=kept):
                    continue
                if kept is None or source is None:
                    return None
                # No room for a copy beside it: the prefix itself goes on.
                slot = self._prefixes.take(kept)
                self._stats.num_adopted += 1
                self._engine.truncate(slot, source.num_shared)
                return slot

    def _slot(self, capacity_tokens: int, source: Source | None) -> int:
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
