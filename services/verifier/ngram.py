"""What sequences' own texts propose: the verifier's part in drafting, which needs no drafter and no network.

Responsible for: which odds a sequence's mode has, and keeping an index beside its committed text. Deliberately does not
know: tries, steps, tensors. Filled by the step loop, on its thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.contract.limits import MAX_DRAFT_LENGTH
from paceline.ngram import MatchAcceptance, NgramProposal, TextIndex
from paceline.sampling import VerifyMode

MAX_NGRAM_TOKENS = MAX_DRAFT_LENGTH
"""Most tokens of an n-gram proposal."""

SURE_PROPOSAL = 0.7
"""From this chance of its first token on, an n-gram proposal is verified without waiting for a draft beside it.

A draft helps where the n-gram proposal ends at once; on two cores of a CPU it costs a quarter of a step.
"""

_MODES = (VerifyMode.GREEDY, VerifyMode.COUPLED, VerifyMode.TYPICAL)
"""The other modes verify what was drawn, and a tree is either drawn or not."""


@dataclass(slots=True)
class NgramProposer:
    """One sequence's text.

    Attributes:
        odds: shared by the verifier's sequences of one mode.
        max_tokens: of an n-gram proposal.
        num_read: committed tokens that the index has taken in; fewer than there are while a prompt is run.
        proposal: how the committed text may go on; None while nothing in it repeats.
    """

    odds: MatchAcceptance
    max_tokens: int
    num_read: int = 0
    proposal: NgramProposal | None = None
    _index: TextIndex = field(default_factory=TextIndex)

    def read(self, committed: Sequence[int], upto: int) -> None:
        """Take in the committed text up to a length, and look for an n-gram proposal once that is all of it."""
        fresh = committed[self.num_read : upto]
        if self.proposal is not None:
            self.odds.observe(self.proposal, fresh)
        self._index.extend(fresh)
        self.num_read = max(self.num_read, upto)
        self.proposal = self._index.propose(self.max_tokens, self.odds) if upto == len(committed) else None


class NgramProposers:
    """NgramProposers in the texts of one verifier.

    Args:
        max_tokens: of an n-gram proposal, at most MAX_NGRAM_TOKENS; 0 looks nothing up.
    """

    def __init__(self, max_tokens: int) -> None:
        if not 0 <= max_tokens <= MAX_NGRAM_TOKENS:
            raise ValueError(f"max_tokens must be between 0 and {MAX_NGRAM_TOKENS}, got {max_tokens}")
        self._max_tokens = max_tokens
        self._odds = {mode: MatchAcceptance() for mode in _MODES}

    def of(self, mode: VerifyMode) -> NgramProposer | None:
        """For one sequence; None where its mode has none, or nothing is looked up."""
        odds = self._odds.get(mode)
        return None if odds is None or not self._max_tokens else NgramProposer(odds, self._max_tokens)
