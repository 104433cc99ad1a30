"""A sequence as the draft loop sees it. Owned by the loop's thread; knows no gRPC and no tensors.

Lengths follow one convention: `length` committed tokens y[0..length-1]; a draft that goes on from them needs the
target's features of positions 0..length-2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.sampling import SamplingParams

if TYPE_CHECKING:
    from services.drafter.session import DraftSession


@dataclass(slots=True)
class Want:
    """A draft that is owed.

    Attributes:
        frame_id: the frame that asked for it; 0 where that has been answered already, without this draft, or where
            tokens that came with features asked for it.
        arrived_at: when that came in.
        expires_at: when it stops waiting for features.
    """

    frame_id: int
    arrived_at: float
    expires_at: float


@dataclass(slots=True, eq=False)
class DraftSequence:
    """One sequence of one conductor.

    Attributes:
        local_id: this process's id, never used twice; the drafter knows the sequence by it.
        wire_id: the verifier's id.
        epoch: the conductor's epoch for it.
        num_features: positions up to the newest whose features have been fed, counted from 0.
        fed_at: when its newest features came in.
        reads_features: the drafter reads the target's features for it.
        reads_last_only: the drafter reads the features of the newest position alone, so that those of a longer text are
            of no use for a shorter one.
        has_commits: a commit has come in since the opening.
        want: the draft that is owed, if one is.
        drafted_length: committed length of the last draft made, 0 before the first.
        num_drafted: tokens of the longest draft for that length.
        outcomes_length: committed length of the last draft whose outcomes were drafted past.
        partition: of the drafters that share its outcomes, which this one is.
        num_partitions: how many they are.
        missing_since: when features first failed to come in, None while they keep up.
    """

    session: DraftSession
    local_id: int
    wire_id: int
    epoch: int
    sampling: SamplingParams
    max_draft_tokens: int
    length: int
    num_features: int = 0
    has_commits: bool = False
    want: Want | None = None
    drafted_length: int = 0
    num_drafted: int = 0
    outcomes_length: int = 0
    partition: int = 0
    num_partitions: int = 1
    missing_since: float | None = None
    fed_at: float = 0.0
    reads_features: bool = False
    reads_last_only: bool = False

    @property
    def complete_at(self) -> float:
        """When the newest came in of all that the draft it is owed reads."""
        return max(self.fed_at, self.want.arrived_at if self.want is not None else 0.0)

    @property
    def has_features(self) -> bool:
        """Whether the features for a draft from the committed length are all in: one at least where any are read."""
        return not self.lacks_features and not (self.reads_last_only and self.num_features >= self.length)

    @property
    def lacks_features(self) -> bool:
        """Whether features have yet to come in; where they are ahead of the tokens, those have."""
        return self.reads_features and self.num_features < max(1, self.length - 1)
