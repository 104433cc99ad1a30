"""The unfinished sequences: which of them run, which wait, and what ends them.

Sequences run in order of arrival. A sequence without a free slot waits. When the KV cache is full, the youngest running
sequence gives way to older ones. So waiting sequences are always younger than running ones, and the oldest always
continues.

Responsible for: admitting, preempting, failing and dropping sequences, with everything that is kept for them.

Deliberately does not know: where slots come from (`kv_allocator.py`), what a step does, commands (`commands.py`).

Called by: the step loop and its stages, on the loop's thread.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import structlog

from paceline.contract.failures import FailureReason, StatusCode
from paceline.sampling.rules import RuleError
from paceline.target import TargetEngine
from paceline.v1 import peer_pb2, target_pb2
from services.verifier.colocated import ColocatedDrafter
from services.verifier.feature_hub import FeatureHub
from services.verifier.kv_allocator import KVAllocator
from services.verifier.publisher import StepPublisher
from services.verifier.report import DropStats
from services.verifier.sequence import TargetSequence
from services.verifier.sequence_state import TargetSequenceState
from services.verifier.session import VerifySession

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class SequenceLimits:
    """What a verifier's sequences may use together.

    Attributes:
        max_sequences: sequences that run at once.
        max_waiting: sequences that wait for a slot; one more is refused.
        prefix_cache_bytes: most bytes of kept prefixes; 0 shares none.
        ngram_tokens: most tokens of an n-gram proposal; 0 proposes none.
    """

    max_sequences: int
    max_waiting: int = 256
    prefix_cache_bytes: int = 0
    ngram_tokens: int = 0


class TargetSequences:
    """Unfinished sequences by id.

    Ids start at a random number and only rise. So one instance uses no id twice, two instances hardly ever share one,
    and order by id is order of arrival.

    Attributes:
        kv_allocator: gives out slots.
        drops: draft nodes that were not verified since the last step event.
    """

    def __init__(
        self,
        engine: TargetEngine,
        features: FeatureHub,
        drafter: ColocatedDrafter | None,
        publisher: StepPublisher,
        limits: SequenceLimits,
    ) -> None:
        self._engine = engine
        self._features = features
        self._drafter = drafter
        self._publisher = publisher
        self._limits = limits
        self.kv_allocator = KVAllocator(engine, features, limits.prefix_cache_bytes)
        self.drops = DropStats()
        self._by_id: dict[int, TargetSequence] = {}
        self._last_id = secrets.randbits(48) << 8
        self._may_admit = False  # something changed since the first waiting sequence found no slot

    @property
    def running(self) -> list[TargetSequence]:
        """Sequences that have a slot, in order of arrival."""
        return [s for s in self._by_id.values() if s.state is TargetSequenceState.RUNNING]

    @property
    def waiting(self) -> list[TargetSequence]:
        """Sequences that wait for a slot, in order of arrival; each arrived after all that run."""
        return [s for s in self._by_id.values() if s.state is TargetSequenceState.WAITING]

    @property
    def is_full(self) -> bool:
        """Whether as many sequences wait as may."""
        return len(self.waiting) >= self._limits.max_waiting

    @property
    def num_unfinished(self) -> int:
        """How many sequences run or wait; may be read from another thread."""
        return len(self._by_id)

    def get(self, sequence_id: int, session: VerifySession) -> TargetSequence | None:
        """A session's sequence; None where the session has no unfinished sequence of this id."""
        sequence = self._by_id.get(sequence_id)
        return sequence if sequence is not None and sequence.owner is session else None

    def next_id(self) -> int:
        """An id that no sequence had before."""
        self._last_id += 1
        return self._last_id

    def add(self, sequence: TargetSequence) -> None:
        """Add a sequence; it waits until it is admitted."""
        self._by_id[sequence.sequence_id] = sequence
        # A drafter in this process reads no log; one is kept for sequences that share the prefix later.
        reads_log = self._drafter is None or self.kv_allocator.shares_prefixes
        taps = self._engine.taps
        if sequence.may_be_read and taps and reads_log:
            self._features.open(sequence.sequence_id, last_only=taps[0].last_only)
        self._may_admit = True

    def admit(self) -> None:
        """Let waiting sequences run, oldest first, while there are slots; no sequence overtakes another.

        A sequence that finds no slot although nothing else runs never will, and fails.
        """
        running = self.running
        if not self._may_admit and running:
            return
        self._may_admit = False
        for sequence in self.waiting:
            if len(running) >= self._limits.max_sequences:
                return
            if self.kv_allocator.take(sequence, running):
                sequence.move_to(TargetSequenceState.RUNNING)
                self._open_at_drafter(sequence)
                running.append(sequence)
            elif running:
                return
            else:
                message = f"{sequence.committed_length} tokens do not fit into the KV cache"
                self._fail(sequence, StatusCode.RESOURCE_EXHAUSTED, FailureReason.KV_CACHE_EXHAUSTED, message)

    def preempt_youngest(self) -> TargetSequence:
        """Take the slot of the sequence that arrived last; it waits, and runs its text again later.

        The caller runs the other sequences first, so that they get the memory. Slots grow by doubling, and a new slot
        has tokens to spare, so that repeated preemption costs a bounded fraction of the work.
        """
        sequence = self.running[-1]
        log.debug("preempted", sequence_id=sequence.sequence_id, num_tokens=sequence.committed_length)
        self.kv_allocator.release(sequence, keep=False)
        self.kv_allocator.note_preemption()
        sequence.move_to(TargetSequenceState.WAITING)
        self._may_admit = True
        return sequence

    def fail_rule(self, sequence: TargetSequence, error: RuleError) -> None:
        """End a sequence whose own rules allow no token."""
        self._fail(sequence, StatusCode.INVALID_ARGUMENT, error.reason, str(error.inside("sampling")))

    def drop_finished(self) -> None:
        """Free what is kept for the sequences that ended in this step."""
        for sequence in [s for s in self._by_id.values() if s.state is TargetSequenceState.FINISHED]:
            self.drop(sequence)

    def drop_session(self, session: VerifySession) -> None:
        """End all sequences of a session."""
        for sequence in [s for s in self._by_id.values() if s.owner is session]:
            self.drop(sequence)

    def drop(self, sequence: TargetSequence, *, keep: bool = True) -> None:
        """End a sequence and free its slot, logs and drafts.

        Args:
            sequence: an unfinished sequence, or one that ended in this step.
            keep: whether its slot may serve as a prefix for later sequences.
        """
        del self._by_id[sequence.sequence_id]
        if sequence.state is not TargetSequenceState.FINISHED:
            sequence.move_to(TargetSequenceState.FINISHED)
        self.kv_allocator.release(sequence, keep=keep)
        self._may_admit = True
        self._features.close(sequence.sequence_id)
        if self._drafter is not None:
            self._drafter.close(sequence.sequence_id)

    def _fail(self, sequence: TargetSequence, code: int, reason: str, message: str) -> None:
        """End one sequence with an error; the others continue."""
        failure = peer_pb2.SequenceFailure(
            sequence_id=sequence.sequence_id, code=code, reason=reason, message=message
        )
        self._publisher.push(sequence.owner, target_pb2.VerifyResponse(failures=[failure]))
        self.drop(sequence, keep=False)  # its slot may hold rows of a step without a verdict

    def _open_at_drafter(self, sequence: TargetSequence) -> None:
        """Open a sequence at the drafter in this process, with the features of its shared prefix."""
        if self._drafter is None or not sequence.may_draft:
            return
        if not self._drafter.knows(sequence.sequence_id):
            self._drafter.open(sequence)
        features = self._features.first(sequence.sequence_id, sequence.num_cached)
        if features is not None:
            self._drafter.feed(sequence.sequence_id, 0, features)
