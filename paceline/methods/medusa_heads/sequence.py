"""State of a sequence of a drafter with Medusa's heads."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from paceline.drafts import SiblingDraws


@dataclass(slots=True)
class MedusaSequence:
    """State of a sequence.

    Attributes:
        tokens: committed tokens.
        features: `[1, hidden]` of the newest position that arrived.
        position: that position, -1 before the first.
        logits: `[k, draft_vocab]` of the heads that were run, the first `k`.
        logits_length: committed length that `logits` and `draws` continue; 0 before the first.
        draws: of each position of the chain, if tokens are drawn.
    """

    tokens: list[int]
    features: Tensor | None = None
    position: int = -1
    logits: Tensor | None = None
    logits_length: int = 0
    draws: list[SiblingDraws] = field(default_factory=list)

    @property
    def num_run(self) -> int:
        """Heads that have been run."""
        return 0 if self.logits is None else int(self.logits.shape[0])

    @property
    def is_ready(self) -> bool:
        """Whether the features are those of the position before the root."""
        return self.position >= 0 and self.position == len(self.tokens) - 2
