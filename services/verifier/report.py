"""What a step did, collected per session and packed into one frame each.

Responsible for: the packed layout of paceline.v1.StepReport.

Deliberately does not know: how the step came about.

Called by: the step loop, which collects; the event loop's thread, which packs frames while the next pass runs.
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
        start: committed length before the step.
        draft_depth: depth of the verified tree.
        num_ngram_tokens: nodes that come from an n-gram proposal alone.
        drafter_depth: depth of the drafter's part of the tree.
        num_accepted_of_drafter: accepted tokens that a drafter proposed.
        is_cache_hit: True where the trie already continues the new committed text.
        acceptance_samples: which draft tokens were accepted, packed (see services.verifier.calibration).
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
        """Whether these tokens are the request's first."""
        return self.start == len(self.sequence.spec.prompt)

    @property
    def is_last(self) -> bool:
        """Whether the sequence ended in this step."""
        return self.finish is not Finish.NOT_YET


@dataclass(slots=True)
class StepStats:
    """Sizes and times of a step, as in paceline.v1.StepReport; the last four are for metrics alone.

    Attributes:
        laps: seconds by stage since the last step was measured.
        num_waiting: sequences that wait for a slot.
        kv_allocator: what happened to slots since the last step.
        choice: the draft nodes that were chosen for the step.
        kv_usage: used fraction of the KV cache's limit, 0 to 1; None without a limit.
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
        """Microseconds of the given stages together."""
        return round(sum(self.laps[stage] for stage in stages) * 1e6)


@dataclass(slots=True)
class DropStats:
    """Draft nodes since the last step event that the committed text cannot use, or cannot use yet, by cause.

    Evicted nodes are not counted, nor nodes of n-gram proposals.

    Attributes:
        stale: nodes that the committed text does not continue through, and nodes outside the trie's window. They may
            have been verified and rejected. When a sequence ends, all nodes that are left in its trie are stale.
        old_epoch: nodes for a sequence or an epoch that is gone.
        malformed: nodes of entries with a wrong number or with arrays that disagree.
        ahead: nodes that start past the committed length. They are kept until the committed length reaches them.
    """

    stale: int = 0
    old_epoch: int = 0
    malformed: int = 0
    ahead: int = 0

    def take(self) -> target_pb2.DroppedDrafts:
        """The counts as a message; counting starts again from zero."""
        taken = target_pb2.DroppedDrafts(
            stale=self.stale, old_epoch=self.old_epoch, malformed=self.malformed, ahead=self.ahead
        )
        self.stale = self.old_epoch = self.malformed = self.ahead = 0
        return taken


@dataclass(frozen=True, slots=True)
class StepEvent:
    """What is published of a step. Another thread reads the event, so nothing in it may change afterwards.

    Attributes:
        commits: in the order of the step.
        sessions: sessions with a sequence in the step or waiting for a slot. Each gets a report, also while only
            prompts run: a conductor treats silence as a failure.
        log_probs: the requested log-probabilities and the session that requested them.
        dropped: draft nodes since the last step that the committed text cannot use, by cause.
        num_running: sequences that continue after the step.
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
        """One frame per session, with the commits of its own sequences."""
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
        acceptance_samples=[sample for c in commits for sample in c.acceptance_samples],
    )
