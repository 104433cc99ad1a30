"""The sequences of this process: opened, fed with drafts and closed by commands; who of them runs and who waits.

Sequences run in order of arrival. One that finds no room waits, and the youngest that runs gives way to older ones
when room runs out, so that those that wait are always younger than those that run, and the oldest always goes on. Slots
come from `kv_allocator.py`. Called by the step loop alone.
"""

from __future__ import annotations

import secrets

import structlog

from paceline.contract.failures import FailureReason, StatusCode
from paceline.sampling import RuleError
from paceline.target import TargetEngine
from paceline.trie import DraftError
from paceline.v1 import peer_pb2, target_pb2
from services.verifier.calibration import Calibrators
from services.verifier.colocated import ColocatedDrafter
from services.verifier.features import FeatureHub
from services.verifier.inbox import Attach, Close, CloseSession, Command, Drafts, Open, SetPolicy
from services.verifier.kv_allocator import KVAllocator
from services.verifier.ngram import NgramProposers
from services.verifier.policy import StepPolicy
from services.verifier.report import Drops
from services.verifier.rules import make_rules
from services.verifier.sequence import TargetSequence, TargetSequenceState
from services.verifier.session import VerifySession

log = structlog.get_logger()


class TargetSequences:
    """Unfinished sequences by id.

    Ids start at a random number and only rise, so that no id is used twice by one instance and hardly ever by two, and
    order by id is order of arrival.

    Attributes:
        kv_allocator: where slots come from.
        calibrators: what confidences of drafts come from.
    """

    def __init__(
        self,
        engine: TargetEngine,
        features: FeatureHub,
        drafter: ColocatedDrafter | None,
        max_sequences: int,
        max_waiting: int = 256,
        prefix_cache_bytes: int = 0,
        ngram_tokens: int = 0,
    ) -> None:
        self._engine = engine
        self._features = features
        self._drafter = drafter
        self._max_sequences = max_sequences
        self._max_waiting = max_waiting
        self.kv_allocator = KVAllocator(engine, features, prefix_cache_bytes)
        self._by_id: dict[int, TargetSequence] = {}
        self._next_id = secrets.randbits(48) << 8 | 1
        self._may_admit = False  # something changed since the first in the queue found no room
        self.drops = Drops()
        self._ngram = NgramProposers(ngram_tokens)
        self.calibrators = Calibrators("separate" if drafter is None else drafter.method)

    @property
    def running(self) -> list[TargetSequence]:
        """Sequences that have a slot, in order of arrival."""
        return [s for s in self._by_id.values() if s.state is TargetSequenceState.RUNNING]

    @property
    def waiting(self) -> list[TargetSequence]:
        """Sequences that wait for a slot, in order of arrival; each came after all that run."""
        return [s for s in self._by_id.values() if s.state is TargetSequenceState.WAITING]

    @property
    def num_unfinished(self) -> int:
        """How many run or wait; may be read from another thread."""
        return len(self._by_id)

    def apply(self, command: Command) -> StepPolicy | None:
        """Carry out a command; returns a new policy if it is one."""
        match command:
            case SetPolicy(policy):
                return policy
            case Open():
                self._open(command)
            case Close(session, sequence_id):
                sequence = self._by_id.get(sequence_id)
                if sequence is not None and sequence.owner is session:
                    self._drop(sequence)
            case CloseSession(session):
                for sequence in [s for s in self._by_id.values() if s.owner is session]:
                    self._drop(sequence)
            case Attach(session, sequence_id, subscriber_id, start):
                sequence = self._by_id.get(sequence_id)
                if sequence is not None and sequence.owner is session:
                    self._features.attach(sequence_id, sequence.spec.epoch, subscriber_id, start)
            case Drafts():
                self._take_drafts(command)
        return None

    def admit(self) -> None:
        """Let those that wait run, oldest first, as long as there is room; nobody overtakes.

        One that finds no room although nothing else runs never will, and fails.
        """
        running = self.running
        if not self._may_admit and running:
            return
        self._may_admit = False
        for sequence in self.waiting:
            if len(running) >= self._max_sequences:
                return
            if self.kv_allocator.take(sequence, running):
                sequence.move_to(TargetSequenceState.RUNNING)
                self._begin(sequence)
                running.append(sequence)
            elif running:
                return
            else:
                self._fail(sequence, f"{sequence.committed_length} tokens do not fit into the KV cache")

    def preempt_youngest(self) -> TargetSequence:
        """Take the slot of the sequence that came last; it waits, and runs its text again when there is room.

        The caller runs the others first, so that the room goes to them. Slots grow by doubling and a new one has room
        to grow, so that giving way again and again costs a bounded share of the work.
        """
        sequence = self.running[-1]
        log.debug("preempted", sequence_id=sequence.sequence_id, num_tokens=sequence.committed_length)
        self.kv_allocator.release(sequence, keep=False)
        self.kv_allocator.note_preemption()
        sequence.move_to(TargetSequenceState.WAITING)
        self._may_admit = True
        return sequence

    def drop_finished(self) -> None:
        """Free the sequences that ended in this step."""
        for sequence in [s for s in self._by_id.values() if s.state is TargetSequenceState.FINISHED]:
            self._drop(sequence)

    def _open(self, command: Open) -> None:
        session, spec = command.session, command.spec
        self.admit()  # who came before it is not counted as waiting where there is room
        if not self.kv_allocator.can_hold(len(spec.prompt)):
            self._refuse(
                session,
                spec.key,
                FailureReason.KV_CACHE_EXHAUSTED,
                "the prompt does not fit into the KV cache",
            )
            return
        if len(self.waiting) >= self._max_waiting:
            message = f"{len(self.running)} sequences run and {self._max_waiting} wait"
            self._refuse(session, spec.key, FailureReason.CAPACITY_EXHAUSTED, message)
            return
        sequence = TargetSequence(
            sequence_id=self._next_id,
            spec=spec,
            owner=session,
            max_positions=self._engine.shape.max_positions,
            vocab_size=self._engine.shape.vocab_size,
            rules=make_rules(spec, self._engine.shape.vocab_size),
            calibrator=self.calibrators.of(spec.sampling.resolved_mode),
            ngram=self._ngram.of(spec.sampling.resolved_mode),
        )
        if command.constraint is not None:
            sequence.rules.append(command.constraint)  # last: it has the last word on what may be chosen
        self._next_id += 1
        self._by_id[sequence.sequence_id] = sequence
        # A drafter in this process reads no log; one is kept for those that share the prefix later.
        reads_log = self._drafter is None or self.kv_allocator.shares_prefixes
        taps = self._engine.taps
        if sequence.may_be_read and taps and reads_log:
            self._features.open(sequence.sequence_id, last_only=taps[0].last_only)
        self._may_admit = True
        opened = target_pb2.SequenceOpened(key=spec.key, sequence_id=sequence.sequence_id, epoch=spec.epoch)
        session.push(target_pb2.VerifyResponse(opened=[opened]))

    def _begin(self, sequence: TargetSequence) -> None:
        """Publish a drafter in this process of a sequence that runs, the features of its shared prefix included."""
        if self._drafter is None or not sequence.may_draft:
            return
        if not self._drafter.knows(sequence.sequence_id):
            self._drafter.open(sequence)
        features = self._features.first(sequence.sequence_id, sequence.num_cached)
        if features is not None:
            self._drafter.feed(sequence.sequence_id, 0, features)

    def _refuse(self, session: VerifySession, key: int, reason: str, message: str) -> None:
        failure = peer_pb2.SequenceFailure(
            key=key, code=StatusCode.RESOURCE_EXHAUSTED, reason=reason, message=message
        )
        session.push(target_pb2.VerifyResponse(failures=[failure]))

    def _fail(
        self,
        sequence: TargetSequence,
        message: str,
        reason: str = FailureReason.KV_CACHE_EXHAUSTED,
        code: int = StatusCode.RESOURCE_EXHAUSTED,
    ) -> None:
        """End one sequence, by default for want of room; the others do not notice."""
        failure = peer_pb2.SequenceFailure(
            sequence_id=sequence.sequence_id,
            code=code,
            reason=reason,
            message=message,
        )
        sequence.owner.push(target_pb2.VerifyResponse(failures=[failure]))
        self._drop(sequence, keep=False)  # it may have rows of a step that nothing was decided from

    def fail_rule(self, sequence: TargetSequence, error: RuleError) -> None:
        """End one sequence that a rule of its own request leaves nothing to choose from."""
        self._fail(sequence, str(error.inside("sampling")), error.reason, StatusCode.INVALID_ARGUMENT)

    def _drop(self, sequence: TargetSequence, *, keep: bool = True) -> None:
        del self._by_id[sequence.sequence_id]
        if sequence.state is not TargetSequenceState.FINISHED:
            sequence.move_to(TargetSequenceState.FINISHED)
        self.kv_allocator.release(sequence, keep=keep)
        self._may_admit = True
        self._features.close(sequence.sequence_id)
        if self._drafter is not None:
            self._drafter.close(sequence.sequence_id)

    def _take_drafts(self, command: Drafts) -> None:
        self.drops.malformed += command.num_malformed
        for sequence_id, epoch, entry in command.entries:
            sequence = self._by_id.get(sequence_id)
            if sequence is None or sequence.owner is not command.session or sequence.spec.epoch != epoch:
                self.drops.old_epoch += len(entry.tokens)
                continue
            try:
                outcome = sequence.add_draft(entry)
            except DraftError as error:
                log.debug("draft refused", sequence_id=sequence_id, error=str(error))
                self.drops.malformed += len(entry.tokens)
                continue
            self.drops.stale += outcome.stale
            self.drops.ahead += outcome.ahead
