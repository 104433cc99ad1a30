"""One sequence at the verifier: its committed tokens, its draft trie and what is left of it to run.

Responsible for: choosing the draft nodes of one sequence, and committing the verified tokens to text and trie. Rejected
draft tokens leave the trie in `TargetSequence.commit`.

Deliberately does not know: frames, threads, the engine's tensors.

Called by: the step loop and its stages; a conductor's Open command creates a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as TokenSequence
from dataclasses import dataclass, field

from paceline.contract.errors import IllegalTransitionError
from paceline.draft_tree import EMPTY_TREE, DraftTree
from paceline.drafts import DraftEntry
from paceline.ngram import NgramProposal, merge_proposal
from paceline.sampling.params import VerifyMode
from paceline.sampling.rules import DraftFilter, LogitRule
from paceline.scheduling.calibration import Calibrator
from paceline.trie import AddResult, DraftTrie
from services.verifier.calibration import calibrated
from services.verifier.ngram import SURE_PROPOSAL, NgramProposer
from services.verifier.sequence_state import TRANSITIONS, Finish, TargetSequenceState
from services.verifier.session import VerifySession
from services.verifier.specs import SequenceSpec

NO_SLOT = -1
"""Slot of a sequence that has none."""

MAX_MISSED_WAITS = 2
"""After so many waits in vain, no step waits for the sequence's drafter until its next draft arrives."""


@dataclass(slots=True)
class TargetSequence:
    """A sequence that runs, or waits for a KV slot.

    `committed[:num_cached]` is in the KV cache. The last committed token, the root, is never in the cache: the next
    step runs it, after the part of the prompt that is still to run.

    Attributes:
        owner: session that opened the sequence and gets its reports.
        slot: the engine's handle of its KV cache; NO_SLOT while the sequence waits.
        has_drafter: whether a draft has arrived, so that another may be due.
        num_missed_waits: waits in vain for this sequence's drafter since its last useful draft.
        rules: what the request forbids, favours or punishes.
        min_draft_start: drafts from a shorter committed text are dropped; see `commit`.
        calibrator: turns the drafter's probabilities into confidences; None uses them as they are.
        ngram: finds n-gram proposals; None where the sequence gets none.
    """

    sequence_id: int
    spec: SequenceSpec
    owner: VerifySession
    max_positions: int
    vocab_size: int
    slot: int = NO_SLOT
    committed: list[int] = field(default_factory=list)
    num_cached: int = 0
    state: TargetSequenceState = TargetSequenceState.WAITING
    has_drafter: bool = False
    num_missed_waits: int = 0
    rules: list[LogitRule] = field(default_factory=list)
    min_draft_start: int = 0
    calibrator: Calibrator | None = None
    ngram: NgramProposer | None = None
    trie: DraftTrie = field(init=False)

    def __post_init__(self) -> None:
        self.committed = list(self.spec.prompt)
        self.trie = DraftTrie(self.committed, vocab_size=self.vocab_size)

    def move_to(self, state: TargetSequenceState) -> None:
        """Change the state.

        Raises:
            IllegalTransitionError: TRANSITIONS does not allow it.
        """
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransitionError(f"sequence {self.sequence_id}: {self.state.value} -> {state.value}")
        self.state = state

    @property
    def committed_length(self) -> int:
        """Committed tokens, prompt included."""
        return len(self.committed)

    @property
    def num_uncached(self) -> int:
        """Committed tokens that the target has not run, the root included; at least 1."""
        return len(self.committed) - self.num_cached

    @property
    def is_decoding(self) -> bool:
        """True once only the root is left to run."""
        return self.num_uncached == 1

    @property
    def may_draft(self) -> bool:
        """True unless the request asked for plain decoding."""
        return self.spec.max_draft_nodes > 0

    @property
    def may_be_read(self) -> bool:
        """Whether a drafter may read the target's features of this sequence."""
        return self.may_draft and self.spec.reads_features

    @property
    def is_draft_due(self) -> bool:
        """Whether a drafter's next draft is missing and worth waiting for."""
        return (
            self.is_decoding
            and self.may_draft
            and self.num_tokens_left > 1
            and self.trie.num_nodes == 0
            and self.has_drafter
            and self.num_missed_waits < MAX_MISSED_WAITS
            and not self.is_sure_of_ngram
        )

    @property
    def ngram_proposal(self) -> NgramProposal | None:
        """The n-gram proposal for the committed text, where the request allows drafts."""
        return self.ngram.proposal if self.ngram is not None and self.may_draft else None

    @property
    def is_sure_of_ngram(self) -> bool:
        """Whether the n-gram proposal is likely enough to be verified without a drafter's draft."""
        return (proposal := self.ngram_proposal) is not None and proposal.path_acceptances[0] >= SURE_PROPOSAL

    def propose_ngram(self) -> None:
        """Find an n-gram proposal for the committed text."""
        if self.ngram is not None:
            self.ngram.update(self.committed, self.num_cached + self.is_decoding)

    @property
    def num_tokens_left(self) -> int:
        """Tokens that may still be committed."""
        generated = len(self.committed) - len(self.spec.prompt)
        return min(self.spec.max_new_tokens - generated, self.max_positions - len(self.committed))

    def choose_tree(self, max_nodes: int) -> DraftTree:
        """Draft nodes to verify now: at most `max_nodes` of the drafter's, and the n-gram proposal.

        Rejection and block verification read the draws, and their choice of nodes must not depend on the drawn values.
        So they take the first-arrived nodes: a tree for rejection, a path for block verification. Drawn tokens that a
        rule forbids stay for the same reason: they are rejected, and the draw counts. The other modes take the best
        nodes of the trie, without tokens that a rule forbids.
        """
        depth = self.num_tokens_left - 1
        budget = min(max_nodes, self.spec.max_draft_nodes)
        proposal = self.ngram_proposal
        if depth <= 0 or (proposal is None and (budget <= 0 or self.trie.num_nodes == 0)):
            return EMPTY_TREE
        mode = self.spec.sampling.resolved_mode
        if mode is VerifyMode.REJECTION:
            return self.trie.select_drawn_tree(budget, depth)
        if mode is VerifyMode.BLOCK:
            return self.trie.select_drawn_chain(min(budget, depth))
        tree = self.trie.select_best(budget, depth)
        if proposal is not None:
            most = min(len(tree) + len(proposal.tokens), self.spec.max_draft_nodes)
            tree = merge_proposal(tree, proposal, most, depth)
        for rule in self.rules:
            if isinstance(rule, DraftFilter):
                tree = rule.keep(tree)
        return tree

    def add_draft(self, entry: DraftEntry) -> AddResult:
        """Add a draft entry to the trie.

        A token without draft probabilities is verified in every mode as if q were one-hot: given the text before it the
        token is certain, so the output keeps the target's distribution (Leviathan et al., 2211.17192, section 2.3). The
        token must only be independent of the target's own draws, which use other noise keys.

        The drafter's claims become confidences here, and nowhere else.

        Raises:
            DraftError: the entry is malformed.
        """
        if entry.start < self.min_draft_start:
            return AddResult(stale=len(entry.tokens))
        result = self.trie.add(calibrated(entry, self.calibrator))
        self.has_drafter = True
        if self.trie.num_nodes:
            self.num_missed_waits = 0
        return result

    def commit(
        self, tokens: TokenSequence[int], *, is_whole_draft: bool = True
    ) -> tuple[list[int], Finish, int]:
        """Append verified tokens, cut at the first stop token or limit; the trie drops the nodes they contradict.

        Args:
            tokens: the verified tokens.
            is_whole_draft: whether every verified draft token is among them. Where not, block verification has used
                rejected tokens to decide how many to accept. Drafts from the same random numbers are then dropped, so
                that every later draw is independent of the text.

        Returns:
            The tokens kept, why the sequence ended, and the number of draft nodes that were dropped.

        Raises:
            RuleError: a rule allows no token; the sequence cannot continue.
        """
        kept, finish = [], Finish.NOT_YET
        for token in tokens[: self.num_tokens_left]:
            kept.append(token)
            if token in self.spec.stop_token_ids:
                finish = Finish.STOP
                break
        self.committed.extend(kept)
        for rule in self.rules:
            rule.commit(kept)
        if finish is Finish.NOT_YET and self.num_tokens_left <= 0:
            finish = Finish.LENGTH
        if finish is not Finish.NOT_YET:
            self.move_to(TargetSequenceState.FINISHED)
            num_nodes = self.trie.num_nodes
            return kept, finish, num_nodes - self.trie.commit(kept).matched
        num_dropped = 0
        if not is_whole_draft and self.spec.sampling.resolved_mode is VerifyMode.BLOCK:
            num_dropped = self.trie.clear()
            self.min_draft_start = self.committed_length
        return kept, finish, num_dropped + self.trie.commit(kept).dropped
