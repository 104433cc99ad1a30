"""What each command from the network does: sequences are opened and closed, drafts enter their tries, policies change.

Responsible for: carrying out one command at a time, and counting draft tokens that it throws away: `add_drafts` drops
drafts of unknown sequences, old epochs and malformed entries.

Deliberately does not know: frames as they came (`servicer.py` checks them), which sequences run (`table.py`).

Called by: the step loop, on its thread.
"""

from __future__ import annotations

import structlog

from paceline.contract.failures import FailureReason, StatusCode
from paceline.contract.policy import StepPolicy
from paceline.drafts import DraftError
from paceline.target import TargetEngine
from paceline.v1 import peer_pb2, target_pb2
from services.verifier.calibration import Calibrators
from services.verifier.feature_hub import FeatureHub
from services.verifier.inbox import AddDrafts, Attach, Close, CloseSession, Command, Open, SetPolicy
from services.verifier.ngram import NgramProposers
from services.verifier.publisher import StepPublisher
from services.verifier.rules import make_rules
from services.verifier.sequence import TargetSequence
from services.verifier.session import VerifySession
from services.verifier.table import TargetSequences

log = structlog.get_logger()


class CommandHandler:
    """Carries out commands.

    Args:
        engine: the target, for its vocabulary and limits.
        table: the unfinished sequences.
        features: logs of the sequences' features.
        publisher: sends answers in order with step events.
        calibrators: give the confidences of drafts.
        ngram: makes the sequences' n-gram proposers.

    Attributes:
        policy: the newest policy.
    """

    def __init__(
        self,
        engine: TargetEngine,
        table: TargetSequences,
        features: FeatureHub,
        publisher: StepPublisher,
        calibrators: Calibrators,
        ngram: NgramProposers,
    ) -> None:
        self._shape = engine.shape
        self._table = table
        self._features = features
        self._publisher = publisher
        self._calibrators = calibrators
        self._ngram = ngram
        self.policy = StepPolicy()

    def apply(self, command: Command) -> None:
        """Carry out a command. A session can only name its own sequences."""
        match command:
            case SetPolicy(policy):
                self.policy = policy
                self._features.pause(not policy.is_drafting)
            case Open():
                self._open(command)
            case Close(session, sequence_id):
                if (sequence := self._table.get(sequence_id, session)) is not None:
                    self._table.drop(sequence)
            case CloseSession(session):
                self._table.drop_session(session)
            case Attach(session, sequence_id, subscriber_id, start):
                if (sequence := self._table.get(sequence_id, session)) is not None:
                    self._features.attach(sequence_id, sequence.spec.epoch, subscriber_id, start)
            case AddDrafts():
                self.add_drafts(command)

    def add_drafts(self, command: AddDrafts) -> None:
        """Add draft entries to their sequences' tries; tokens that cannot be added are dropped and counted."""
        drops = self._table.drops
        drops.malformed += command.num_malformed
        for sequence_id, epoch, entry in command.entries:
            sequence = self._table.get(sequence_id, command.session)
            if sequence is None or sequence.spec.epoch != epoch:
                drops.old_epoch += len(entry.tokens)
                continue
            try:
                result = sequence.add_draft(entry)
            except DraftError as error:
                log.debug("draft refused", sequence_id=sequence_id, error=str(error))
                drops.malformed += len(entry.tokens)
                continue
            drops.stale += result.stale
            drops.ahead += result.ahead

    def _open(self, command: Open) -> None:
        """Open a sequence, or refuse it where it can never run or too many wait."""
        session, spec = command.session, command.spec
        self._table.admit()  # sequences that can run now must not count as waiting
        if not self._table.kv_allocator.can_hold(len(spec.prompt)):
            self._refuse(
                session,
                spec.key,
                FailureReason.KV_CACHE_EXHAUSTED,
                "the prompt does not fit into the KV cache",
            )
            return
        if self._table.is_full:
            num_running, num_waiting = len(self._table.running), len(self._table.waiting)
            message = f"{num_running} sequences run and {num_waiting} wait; try again later"
            self._refuse(session, spec.key, FailureReason.CAPACITY_EXHAUSTED, message)
            return
        sequence = TargetSequence(
            sequence_id=self._table.next_id(),
            spec=spec,
            owner=session,
            max_positions=self._shape.max_positions,
            vocab_size=self._shape.vocab_size,
            rules=make_rules(spec, self._shape.vocab_size),
            calibrator=self._calibrators.of(spec.sampling.resolved_mode),
            ngram=self._ngram.of(spec.sampling.resolved_mode),
        )
        if command.constraint is not None:
            sequence.rules.append(command.constraint)  # last: it has the last word on what may be chosen
        self._table.add(sequence)
        opened = target_pb2.SequenceOpened(key=spec.key, sequence_id=sequence.sequence_id, epoch=spec.epoch)
        self._publisher.push(session, target_pb2.VerifyResponse(opened=[opened]))

    def _refuse(self, session: VerifySession, key: int, reason: str, message: str) -> None:
        failure = peer_pb2.SequenceFailure(
            key=key, code=StatusCode.RESOURCE_EXHAUSTED, reason=reason, message=message
        )
        self._publisher.push(session, target_pb2.VerifyResponse(failures=[failure]))
