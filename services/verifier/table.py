"""The sequences of this process: opened, fed with drafts and closed by commands.

Owns the engine's slots and the feature logs by way of opening and closing them. Called by the step loop alone.
"""

from __future__ import annotations

import secrets

import structlog

from paceline.errors import InvalidRequestError
from paceline.sampling import RuleError
from paceline.target import KVCacheFullError, TargetEngine
from paceline.trie import DraftError
from paceline.v1 import peer_pb2, target_pb2
from services.verifier.colocated import ColocatedDrafter
from services.verifier.features import FeatureHub
from services.verifier.inbox import Attach, Close, CloseSession, Command, Drafts, Open, SetPolicy
from services.verifier.policy import StepPolicy
from services.verifier.report import Drops
from services.verifier.sequence import SequenceState, TargetSequence
from services.verifier.session import Session

log = structlog.get_logger()

INVALID_ARGUMENT = 3
RESOURCE_EXHAUSTED = 8


class SequenceTable:
    """Running sequences by id.

    Ids start at a random number and only rise, so that no id is used twice by one instance and hardly ever by two.
    """

    def __init__(
        self,
        engine: TargetEngine,
        features: FeatureHub,
        drafter: ColocatedDrafter | None,
        max_sequences: int,
    ) -> None:
        self._engine = engine
        self._features = features
        self._drafter = drafter
        self._max_sequences = max_sequences
        self._by_id: dict[int, TargetSequence] = {}
        self._next_id = secrets.randbits(48) << 8 | 1
        self.drops = Drops()

    @property
    def running(self) -> list[TargetSequence]:
        """Sequences that go on, in order of arrival."""
        return list(self._by_id.values())

    @property
    def num_running(self) -> int:
        """How many go on; may be read from another thread."""
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

    def drop_finished(self) -> None:
        """Free the sequences that ended in this step."""
        for sequence in [s for s in self._by_id.values() if s.state is SequenceState.FINISHED]:
            self._drop(sequence)

    def _open(self, command: Open) -> None:
        session, spec = command.session, command.spec
        if len(self._by_id) >= self._max_sequences:
            self._refuse(session, spec.key, f"{self._max_sequences} sequences are running")
            return
        try:
            slot = self._engine.open(len(spec.prompt) + min(spec.max_new_tokens, 256))
        except KVCacheFullError as error:
            self._refuse(session, spec.key, str(error))
            return
        sequence = TargetSequence(
            sequence_id=self._next_id,
            spec=spec,
            owner=session,
            slot=slot,
            max_positions=self._engine.shape.max_positions,
            vocab_size=self._engine.shape.vocab_size,
        )
        if command.constraint is not None:
            sequence.rules.append(command.constraint)  # last: it has the last word on what may be chosen
        self._next_id += 1
        self._by_id[sequence.sequence_id] = sequence
        if sequence.may_draft:
            if self._drafter is not None:
                self._drafter.open(sequence)
            elif self._engine.taps:
                self._features.open(sequence.sequence_id)
        opened = target_pb2.SequenceOpened(key=spec.key, sequence_id=sequence.sequence_id, epoch=spec.epoch)
        session.push(target_pb2.VerifyResponse(opened=[opened]))

    def _refuse(self, session: Session, key: int, message: str) -> None:
        failure = peer_pb2.SequenceFailure(
            key=key, code=RESOURCE_EXHAUSTED, reason="CAPACITY_EXHAUSTED", message=message
        )
        session.push(target_pb2.VerifyResponse(failures=[failure]))

    def fail(
        self, sequence: TargetSequence, reason: str, message: str, code: int = RESOURCE_EXHAUSTED
    ) -> None:
        """End one sequence, by default for want of room; the others do not notice."""
        failure = peer_pb2.SequenceFailure(
            sequence_id=sequence.sequence_id, code=code, reason=reason, message=message
        )
        sequence.owner.push(target_pb2.VerifyResponse(failures=[failure]))
        self._drop(sequence)

    def fail_rule(self, sequence: TargetSequence, error: RuleError) -> None:
        """End one sequence that a rule of its own request leaves nothing to choose from."""
        refusal = InvalidRequestError(f"sampling.{error.field}", error.message)
        self.fail(sequence, refusal.reason, str(refusal), INVALID_ARGUMENT)

    def _drop(self, sequence: TargetSequence) -> None:
        sequence.state = SequenceState.FINISHED
        del self._by_id[sequence.sequence_id]
        self._engine.close(sequence.slot)
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
