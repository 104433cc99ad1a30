"""A sequence as the draft loop sees it. Owned by the loop's thread; knows no gRPC and no tensors.

Lengths follow one convention: `length` committed tokens y[0..length-1]; a draft that continues them needs the
target's features of positions 0..length-2.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.sampling.params import SamplingParams
from services.drafter.session import DraftSession


@dataclass(slots=True)
class PendingDraft:
    """A draft that a sequence is to get.

    Attributes:
        frame_id: the frame that asked for the draft. 0 where that frame has been answered already without the draft, or
            where tokens that came with features asked for it.
        arrived_at: when the frame or the features came in.
        expires_at: when the draft stops waiting for features.
    """

    frame_id: int
    arrived_at: float
    expires_at: float


@dataclass(slots=True, eq=False)
class DraftSequence:
    """One sequence of one conductor.

    Attributes:
        session: the conductor's stream.
        local_id: this process's id, never used twice; the drafter knows the sequence by it.
        sequence_id: the verifier's id.
        epoch: the conductor's epoch.
        sampling: how the target samples.
        max_draft_tokens: most draft tokens in one draft, as the request allows.
        length: committed tokens.
        num_features: positions up to the newest one whose features the drafter has, counted from 0.
        has_commits: a commit has come in since the opening.
        pending: the draft that the sequence is to get; None where it has got all.
        drafted_length: committed length of the last draft made, 0 before the first.
        num_drafted: tokens of the longest draft for that length.
        cached_length: committed length of the last draft whose verification outcomes were drafted ahead for.
        partition: the partition of the verification outcomes that this drafter drafts ahead for; partition 0 also
            sends the drafts.
        num_partitions: drafters among which the outcomes are partitioned.
        missing_since: when features were first found missing, None while none are.
        fed_at: when the newest features came in.
        reads_features: the drafter reads the target's features for this sequence.
        reads_last_only: the drafter reads the features of the newest position alone, so features of a longer text are
            of no use for a shorter one.
    """

    session: DraftSession
    local_id: int
    sequence_id: int
    epoch: int
    sampling: SamplingParams
    max_draft_tokens: int
    length: int
    num_features: int = 0
    has_commits: bool = False
    pending: PendingDraft | None = None
    drafted_length: int = 0
    num_drafted: int = 0
    cached_length: int = 0
    partition: int = 0
    num_partitions: int = 1
    missing_since: float | None = None
    fed_at: float = 0.0
    reads_features: bool = False
    reads_last_only: bool = False

    @property
    def complete_at(self) -> float:
        """When the last of the inputs of the pending draft came in: its features or its frame."""
        return max(self.fed_at, self.pending.arrived_at if self.pending is not None else 0.0)

    @property
    def has_features(self) -> bool:
        """Whether exactly the features that a draft from the committed length reads are in."""
        return not self.lacks_features and not (self.reads_last_only and self.num_features >= self.length)

    @property
    def lacks_features(self) -> bool:
        """Whether features have yet to come in: those of at least one position where any are read."""
        return self.reads_features and self.num_features < max(1, self.length - 1)

    @property
    def is_missing_features(self) -> bool:
        """Whether features are late. A commit proves that the target has run all positions before it."""
        return self.has_commits and self.lacks_features

    @property
    def has_unanswered_frame(self) -> bool:
        """Whether a frame waits for the pending draft."""
        return self.pending is not None and self.pending.frame_id != 0
