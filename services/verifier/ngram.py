"""N-gram proposals of the verifier's sequences; they need no drafter and no network.

Responsible for: which acceptance curve a sequence's mode uses, and an index beside each sequence's committed text.

Deliberately does not know: tries, steps, tensors.

Called by: the step loop's stages, on its thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.contract.limits import MAX_DRAFT_LENGTH
from paceline.ngram import MatchAcceptance, NgramProposal, TextIndex
from paceline.sampling.params import VerifyMode

MAX_NGRAM_TOKENS = MAX_DRAFT_LENGTH
"""Most tokens of an n-gram proposal."""

SURE_PROPOSAL = 0.7
"""If its first token is at least this likely, an n-gram proposal is verified without waiting for a draft.

A draft helps only where the n-gram proposal fails at once; on two CPU cores it costs a quarter of a step.
"""

_MODES = (VerifyMode.GREEDY, VerifyMode.COUPLED, VerifyMode.TYPICAL)
"""The other modes verify drawn tokens, and a tree is either drawn or not."""


@dataclass(slots=True)
class NgramProposer:
    """Finds the n-gram proposals of one sequence.

    Attributes:
        acceptance: shared by the verifier's sequences of one mode.
        max_tokens: of an n-gram proposal.
        num_indexed: committed tokens in the index; fewer than committed while a prompt is run.
        proposal: for the committed text; None while nothing in it repeats.
    """

    acceptance: MatchAcceptance
    max_tokens: int
    num_indexed: int = 0
    proposal: NgramProposal | None = None
    _index: TextIndex = field(default_factory=TextIndex)

    def update(self, committed: Sequence[int], num_tokens: int) -> None:
        """Index the first `num_tokens` committed tokens; once these are all of them, look for a proposal."""
        new_tokens = committed[self.num_indexed : num_tokens]
        if self.proposal is not None:
            self.acceptance.observe(self.proposal, new_tokens)
        self._index.extend(new_tokens)
        self.num_indexed = max(self.num_indexed, num_tokens)
        is_complete = num_tokens == len(committed)
        self.proposal = self._index.propose(self.max_tokens, self.acceptance) if is_complete else None


class NgramProposers:
    """Makes the proposers of one verifier's sequences.

    Args:
        max_tokens: of an n-gram proposal, at most MAX_NGRAM_TOKENS; 0 proposes none.
    """

    def __init__(self, max_tokens: int) -> None:
        if not 0 <= max_tokens <= MAX_NGRAM_TOKENS:
            raise ValueError(f"max_tokens must be between 0 and {MAX_NGRAM_TOKENS}, got {max_tokens}")
        self._max_tokens = max_tokens
        self._acceptance = {mode: MatchAcceptance() for mode in _MODES}

    def of(self, mode: VerifyMode) -> NgramProposer | None:
        """A proposer for one sequence; None where its mode allows none, or n-gram proposals are off."""
        acceptance = self._acceptance.get(mode)
        return NgramProposer(acceptance, self._max_tokens) if acceptance and self._max_tokens else None
