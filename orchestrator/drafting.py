"""The drafters' side of one sequence: which drafters have it open, and what may be opened again.

Several drafters may draft ahead for one sequence. The verification outcomes they draft for are then partitioned:
each drafter fills its own partition of the speculation cache (arXiv 2603.03251). The drafter of partition 0 also
makes the drafts themselves.

Written by orchestrator.draft_dispatcher.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.drafter_link import DrafterLink
from orchestrator.placement import ANY_DRAFTER, DrafterRequirement
from paceline.v1 import generation_pb2


@dataclass(slots=True)
class Attachment:
    """One drafter that has a sequence open.

    Attributes:
        link: the drafter.
        epoch: the epoch of the sequence at this drafter.
        partition: the partition of the verification outcomes that this drafter drafts ahead for.
        num_sent_tokens: tokens of the text that were sent to this drafter.
    """

    link: DrafterLink
    epoch: int
    partition: int
    num_sent_tokens: int


@dataclass(slots=True)
class Drafting:
    """All drafters of one sequence.

    Attributes:
        attachments: the drafters that have the sequence open, by partition.
        num_partitions: drafters among which the verification outcomes are partitioned; some may be missing.
        requirement: what the request asks of its drafter.
        is_off: no drafter may have the sequence: the request asked for that, or no drafter has positions left.
        num_reopens: openings in a row that failed; the delay before the next one grows with it.
        retry_at: loop time before which the sequence is not opened again.
        has_featureless_hit: the next step verifies a draft from the speculation cache, and the drafter made it ahead
            of the target's features although it reads them.
        no_draft_reason: why the last step without drafts had none.
    """

    attachments: dict[int, Attachment] = field(default_factory=dict)
    num_partitions: int = 1
    requirement: DrafterRequirement = ANY_DRAFTER
    is_off: bool = False
    num_reopens: int = 0
    retry_at: float = 0.0
    has_featureless_hit: bool = False
    no_draft_reason: generation_pb2.NoDraftReason = generation_pb2.NO_DRAFT_REASON_UNSPECIFIED

    @property
    def reads_features(self) -> bool:
        """Whether an attached drafter reads features; such a drafter drafts ahead from its own outputs instead."""
        return any(attachment.link.reads_features for attachment in self.attachments.values())

    @property
    def missing_partitions(self) -> list[int]:
        """Partitions without a drafter, the most important first."""
        return [partition for partition in range(self.num_partitions) if partition not in self.attachments]

    def at(self, link: DrafterLink) -> Attachment | None:
        """The attachment to a drafter, None where that drafter does not have the sequence."""
        return next((a for a in self.attachments.values() if a.link is link), None)
