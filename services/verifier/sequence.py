"""One sequence at the verifier: its committed tokens, its draft trie and what is left of it to run.

Knows nothing of frames, threads or the engine's tensors. Created when a conductor opens a sequence, changed by the
step loop alone, dropped when the sequence ends.
"""

from __future__ import annotations

from collections.abc import Sequence as TokenSequence
from dataclasses import dataclass, field, replace
from enum import Enum

from paceline.contract.errors import IllegalTransitionError
from paceline.ngram import NgramProposal, merge_proposal
from paceline.sampling import DraftFilter, LogitRule, SamplingParams, VerifyMode
from paceline.scheduling.calibration import Calibrator
from paceline.trie import EMPTY_TREE, AddResult, DraftEntry, DraftTree, DraftTrie
from services.verifier.ngram import SURE_PROPOSAL, NgramProposer
from services.verifier.session import VerifySession

NO_SLOT = -1
"""Slot of a sequence that has none."""

MAX_MISSED_WAITS = 2
"""After so many waits in vain, no step waits for the sequence's drafter until its next draft arrives."""


class TargetSequenceState(Enum):
    """Where a sequence stands; TRANSITIONS says how it moves."""

    WAITING = "waiting"
    """It has no slot: it was opened just now, or lost its slot to older ones."""
    RUNNING = "running"
    """It takes part in steps."""
    FINISHED = "finished"
    """It ended, whatever the reason."""


TRANSITIONS: dict[TargetSequenceState, frozenset[TargetSequenceState]] = {
    TargetSequenceState.WAITING: frozenset({TargetSequenceState.RUNNING, TargetSequenceState.FINISHED}),
    TargetSequenceState.RUNNING: frozenset({TargetSequenceState.WAITING, TargetSequenceState.FINISHED}),
    TargetSequenceState.FINISHED: frozenset(),
}


class Finish(Enum):
    """Why a sequence ended; the values are names of paceline.v1.FinishReason."""

    NOT_YET = "FINISH_REASON_UNSPECIFIED"
    STOP = "FINISH_REASON_STOP"
    LENGTH = "FINISH_REASON_LENGTH"


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """What a conductor asks for, checked.

    Attributes:
        max_new_tokens: most tokens to commit here.
        num_resumed_tokens: tokens at the end of the prompt that were generated before a move.
        num_top: alternatives to report beside each committed token; None reports no log-probabilities.
        num_prompt_top: the same for the prompt's tokens.
        may_share_prefix: False where every row of the prompt must be run for this request itself.
        reads_features: False where its drafter, whichever it is, does without the target's features.
    """

    key: int
    epoch: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    max_draft_nodes: int
    num_resumed_tokens: int = 0
    num_top: int | None = None
    num_prompt_top: int | None = None
    may_share_prefix: bool = True
    reads_features: bool = True

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that the request itself began with."""
        return len(self.prompt) - self.num_resumed_tokens


@dataclass(slots=True)
class TargetSequence:
    """A sequence that runs, or waits for room to.

    `committed[:num_cached]` is in the KV cache; the last committed token, the root, never is: it is the first row of
    the next step together with whatever of the prompt is still to run.

    Attributes:
        owner: session that opened it and gets its reports.
        slot: the engine's handle of its KV cache; NO_SLOT while it waits.
        has_drafter: a draft has come in for it, so that another may be due.
        num_missed_waits: steps held in vain for this sequence since a draft of use last came in.
        rules: what the request forbids, favours or punishes.
        fresh_from: drafts that go on from a shorter text are not used any more; see `commit`.
        calibrator: turns the drafter's probabilities into those of acceptance; None takes them as they are.
        ngram: proposes what the text has had before; None where nothing is looked up.
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
    fresh_from: int = 0
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
        """Whether a drafter may read the target's features of it."""
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
        """Whether an n-gram proposal is likely enough to do without a draft beside it."""
        return (proposal := self.ngram_proposal) is not None and proposal.path_acceptances[0] >= SURE_PROPOSAL

    def propose_ngram(self) -> None:
        """Look up what is committed and cached by now."""
        if self.ngram is not None:
            self.ngram.read(self.committed, self.num_cached + self.is_decoding)

    @property
    def num_tokens_left(self) -> int:
        """Tokens that may still be committed."""
        generated = len(self.committed) - len(self.spec.prompt)
        return min(self.spec.max_new_tokens - generated, self.max_positions - len(self.committed))

    def choose_tree(self, max_nodes: int) -> DraftTree:
        """Draft nodes worth verifying now: of a drafter's at most `max_nodes`, and an n-gram proposal of the text
        itself.

        Where verification looks at what was drawn, what came first is taken, since the choice must not depend on the
        values of drawn tokens: a tree for rejection, a path for block verification. Drawn tokens that a rule forbids
        stay for the same reason: they are refused, and that they were drawn counts. The other modes take the best of
        the trie, less what a rule forbids whatever the target says.
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
        """Take in a draft entry.

        Tokens that came without what they were drawn from are verified as they stand, whatever the mode: given the text
        before it such a token is certain, so that the law of the text stays the target's (Leviathan et al., 2211.17192,
        section 2.3 with q one-hot). All it must not depend on are the target's own draws, which are keyed otherwise.

        What the drafter says of its tokens becomes their confidences here, and nowhere else.

        Raises:
            DraftError: the entry is malformed.
        """
        if entry.start < self.fresh_from:
            return AddResult(stale=len(entry.tokens))
        outcome = self.trie.add(self._calibrated(entry))
        self.has_drafter = True
        if self.trie.num_nodes:
            self.num_missed_waits = 0
        return outcome

    def _calibrated(self, entry: DraftEntry) -> DraftEntry:
        """The entry with confidences; as it is where there is no calibrator, or nothing was said."""
        calibrator, num_tokens = self.calibrator, len(entry.tokens)
        num_draws = len(entry.draft_dists or entry.tokens)
        is_sent = (
            len(entry.log_probs) == len(entry.parents) == num_draws == num_tokens and not entry.confidences
        )
        if calibrator is None or not num_tokens or not is_sent:
            return entry
        known = [
            0.0 if claim is None else calibrator.confidence(claim.log_prob, claim.position)
            for claim in entry.claims()
        ]
        first: dict[int, float] = {}  # of drawn siblings, of which only the first has a claim
        for parent, confidence, draws in zip(entry.parents, known, entry.draft_dists or (), strict=False):
            if draws is not None:
                first.setdefault(parent, confidence)
        confidences = tuple(first.get(parent, own) for parent, own in zip(entry.parents, known, strict=True))
        return replace(entry, confidences=confidences)

    def commit(
        self, tokens: TokenSequence[int], *, is_whole_draft: bool = True
    ) -> tuple[list[int], Finish, int]:
        """Append verified tokens, cut at the first stop token or limit.

        Args:
            tokens: the verified tokens.
            is_whole_draft: every drafted token that was verified is among them. Where not, block verification has let
                tokens past the last one decide how many are kept; what was drawn from the same numbers is then not
                used any more, so that every later draw is independent of the text.

        Returns:
            The tokens kept, why the sequence ended, and the number of draft nodes that fell away.

        Raises:
            RuleError: a rule cannot go on; the sequence is of no use any more.
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
            return kept, finish, self.trie.num_nodes
        num_dropped = 0
        if not is_whole_draft and self.spec.sampling.resolved_mode is VerifyMode.BLOCK:
            num_dropped = self.trie.clear()
            self.fresh_from = self.committed_length
        return kept, finish, num_dropped + self.trie.commit(kept).dropped
