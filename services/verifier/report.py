"""What a step did, gathered per session and made into one frame each.

Knows the packed layout of paceline.v1.StepReport and nothing of how the step came about. The step loop gathers; frames
are made on another thread, while the next pass runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from paceline.v1 import peer_pb2, sampling_pb2, target_pb2
from services.verifier.budget import NodeChoice
from services.verifier.kv_allocator import KVAllocatorStats
from services.verifier.sequence import TargetSequence
from services.verifier.sequence_state import Finish
from services.verifier.session import VerifySession
from services.verifier.stopwatch import OVERHEAD, StepStage

_FINISH_REASONS = {finish: getattr(sampling_pb2, finish.value) for finish in Finish}


@dataclass(frozen=True, slots=True)
class CommitReport:
    """What one sequence gained in a step.

    Attributes:
        start: committed length before.
        draft_depth: depth of the verified tree.
        num_ngram_tokens: nodes that no drafter proposed: an n-gram proposal of the text.
        drafter_depth: depth of what a drafter proposed of the tree.
        num_accepted_of_drafter: accepted tokens that a drafter proposed.
        is_cache_hit: True where the trie already goes on from the new committed text.
        acceptance_samples: what became of its draft tokens, packed (see services.verifier.calibration).
    """

    sequence: TargetSequence
    start: int
    tokens: Sequence[int]
    num_draft_tokens: int
    draft_depth: int
    num_accepted_tokens: int
    num_ngram_tokens: int
    drafter_depth: int
    num_accepted_of_drafter: int
    finish: Finish
    is_cache_hit: bool
    acceptance_samples: tuple[int, ...] = ()

    @property
    def is_first(self) -> bool:
        """Whether its tokens are the first that the request gets."""
        return self.start == len(self.sequence.spec.prompt)

    @property
    def is_last(self) -> bool:
        """Whether the sequence ended with it."""
        return self.finish is not Finish.NOT_YET


@dataclass(slots=True)
class StepStats:
    """Sizes and times of a step, as in paceline.v1.StepReport; the last four are for the metrics alone.

    Attributes:
        laps: seconds by stage since the last step's report was begun.
        num_waiting: sequences that wait for room.
        kv_allocator: what happened to slots since the last step.
        choice: the draft nodes that were chosen for it.
        kv_usage: share of the key-value cache's limit in use, 0 to 1; None without a limit.
    """

    step_index: int = 0
    num_rows: int = 0
    num_sequences: int = 0
    num_context_tokens: int = 0
    num_prefill_rows: int = 0
    policy_version: int = 0
    laps: dict[StepStage, float] = field(default_factory=lambda: dict.fromkeys(StepStage, 0.0))
    num_waiting: int = 0
    kv_allocator: KVAllocatorStats = field(default_factory=KVAllocatorStats)
    choice: NodeChoice | None = None
    kv_usage: float | None = None

    @property
    def step_s(self) -> float:
        """Seconds from the beginning of the pass to the last commit."""
        return sum(self.laps[stage] for stage in (StepStage.FORWARD, StepStage.VERIFY, StepStage.COMMIT))

    def us(self, *stages: StepStage) -> int:
        """Microseconds of some stages together."""
        return round(sum(self.laps[stage] for stage in stages) * 1e6)


@dataclass(slots=True)
class DropStats:
    """Draft nodes that were not verified since the last report, by cause."""

    stale: int = 0
    old_epoch: int = 0
    malformed: int = 0
    ahead: int = 0

    def take(self) -> target_pb2.DroppedDrafts:
        """The counts as a message; starts again from zero."""
        taken = target_pb2.DroppedDrafts(
            stale=self.stale, old_epoch=self.old_epoch, malformed=self.malformed, ahead=self.ahead
        )
        self.stale = self.old_epoch = self.malformed = self.ahead = 0
        return taken


@dataclass(frozen=True, slots=True)
class StepEvent:
    """What others are told of a step. Another thread reads it: nothing in it may change afterwards.

    Attributes:
        commits: in the order of the step.
        sessions: those with a sequence in the step or waiting for room. All are told, also while only prompts are run:
            a conductor takes silence as trouble.
        log_probs: what was asked for, by whom.
        dropped: draft nodes that were not verified since the last step.
        num_running: sequences that go on after it.
    """

    stats: StepStats
    commits: Sequence[CommitReport]
    sessions: Sequence[VerifySession]
    log_probs: Sequence[tuple[VerifySession, target_pb2.SequenceLogProbs]]
    dropped: target_pb2.DroppedDrafts
    num_running: int

    @property
    def has_first_or_last_token(self) -> bool:
        """Whether a request gets its first or its last token in this step."""
        return any(commit.is_first or commit.is_last for commit in self.commits)

    def frames(self) -> Iterator[tuple[VerifySession, target_pb2.VerifyResponse]]:
        """Each session's part of the step."""
        for session in self.sessions:
            own = [commit for commit in self.commits if commit.sequence.owner is session]
            report = _report(self.stats, own, self.dropped)
            report.log_probs.extend(message for owner, message in self.log_probs if owner is session)
            yield session, target_pb2.VerifyResponse(step=report)


def _report(
    stats: StepStats, commits: Sequence[CommitReport], dropped: target_pb2.DroppedDrafts
) -> target_pb2.StepReport:
    return target_pb2.StepReport(
        step_index=stats.step_index,
        num_rows=stats.num_rows,
        num_sequences=stats.num_sequences,
        num_context_tokens=stats.num_context_tokens,
        num_prefill_rows=stats.num_prefill_rows,
        forward_us=stats.us(StepStage.FORWARD),
        step_us=round(stats.step_s * 1e6),
        draft_wait_us=stats.us(StepStage.DRAFT_WAIT),
        colocated_draft_us=stats.us(StepStage.DRAFT),
        overhead_us=stats.us(*OVERHEAD),
        policy_version=stats.policy_version,
        commits=peer_pb2.CommitBatch(
            sequence_ids=[c.sequence.sequence_id for c in commits],
            epochs=[c.sequence.spec.epoch for c in commits],
            starts=[c.start for c in commits],
            sizes=[len(c.tokens) for c in commits],
            tokens=[token for c in commits for token in c.tokens],
        ),
        num_draft_tokens=[c.num_draft_tokens for c in commits],
        draft_depths=[c.draft_depth for c in commits],
        num_accepted_tokens=[c.num_accepted_tokens for c in commits],
        drafter_depths=[c.drafter_depth for c in commits],
        num_accepted_of_drafter=[c.num_accepted_of_drafter for c in commits],
        finish_reasons=[_FINISH_REASONS[c.finish] for c in commits],
        cache_hits=[int(c.is_cache_hit) for c in commits],
        dropped=dropped,
        num_acceptance_samples=[len(c.acceptance_samples) for c in commits],
        acceptance_samples=[outcome for c in commits for outcome in c.acceptance_samples],
    )
