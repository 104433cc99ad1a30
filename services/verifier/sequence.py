"""One sequence at the verifier: its committed tokens, its draft trie and what is left of it to run.

Knows nothing of frames, threads or the engine's tensors. Created when a conductor opens a sequence, changed by the
step loop alone, dropped when the sequence ends.
"""

from __future__ import annotations

from collections.abc import Sequence as TokenSequence
from dataclasses import dataclass, field, replace
from enum import Enum

from paceline.sampling import DraftDistribution, DraftFilter, LogitRule, SamplingParams, VerifyMode
from paceline.trie import EMPTY_TREE, AddOutcome, DraftEntry, DraftTree, DraftTrie
from services.verifier.session import Session


class SequenceState(Enum):
    """Where a sequence stands. RUNNING -> FINISHED is the only transition."""

    RUNNING = "running"
    FINISHED = "finished"


class Finish(Enum):
    """Why a sequence ended; the values are names of paceline.v1.FinishReason."""

    NOT_YET = "FINISH_REASON_UNSPECIFIED"
    STOP = "FINISH_REASON_STOP"
    LENGTH = "FINISH_REASON_LENGTH"


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """What a conductor asks for, checked.

    Attributes:
        num_resumed_tokens: tokens at the end of the prompt that belong to the completion.
    """

    key: int
    epoch: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    max_draft_nodes: int
    num_resumed_tokens: int = 0


@dataclass(slots=True)
class TargetSequence:
    """A running sequence.

    `committed[:num_cached]` is in the KV cache; the last committed token, the root, never is: it is the first row of
    the next step together with whatever of the prompt is still to run.

    Attributes:
        owner: session that opened it and gets its reports.
        slot: the engine's handle of its KV cache.
        has_drafter: a draft has come in for it, so that another may be due.
        num_missed_holds: steps held in vain for this sequence since a draft of use last came in.
        rules: what the request forbids, favours or punishes.
    """

    sequence_id: int
    spec: SequenceSpec
    owner: Session
    slot: int
    max_positions: int
    vocab_size: int
    committed: list[int] = field(default_factory=list)
    num_cached: int = 0
    state: SequenceState = SequenceState.RUNNING
    has_drafter: bool = False
    num_missed_holds: int = 0
    rules: list[LogitRule] = field(default_factory=list)
    trie: DraftTrie = field(init=False)

    def __post_init__(self) -> None:
        self.committed = list(self.spec.prompt)
        self.trie = DraftTrie(self.committed, vocab_size=self.vocab_size)

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
    def num_tokens_left(self) -> int:
        """Tokens that may still be committed."""
        generated = len(self.committed) - len(self.spec.prompt)
        return min(self.spec.max_new_tokens - generated, self.max_positions - len(self.committed))

    def choose_tree(self, max_nodes: int) -> DraftTree:
        """Draft nodes worth verifying now, at most `max_nodes`.

        Rejection verification takes the path that came first, since its choice of what to verify must not depend on
        later tokens; the other modes take the best of the trie. What a rule forbids, whatever the target says, is left
        out.
        """
        depth = self.num_tokens_left - 1
        budget = min(max_nodes, self.spec.max_draft_nodes)
        if budget <= 0 or depth <= 0 or self.trie.num_nodes == 0:
            return EMPTY_TREE
        if self.spec.sampling.resolved_mode is VerifyMode.REJECTION:
            tree = self.trie.select_chain(min(budget, depth))
        else:
            tree = self.trie.select(budget, depth)
        for rule in self.rules:
            if isinstance(rule, DraftFilter):
                tree = rule.keep(tree)
        return tree

    def add_draft(self, entry: DraftEntry) -> AddOutcome:
        """Take in a draft entry.

        For rejection sampling its tokens get one-hot draft distributions: a drafter's token is a function of the prefix
        and of noise in another role than the acceptance draws, so that the distribution it was drawn from, given the
        prefix, is a point mass. Nothing but ids need travel, and the law of the text stays the target's (Leviathan et
        al., 2211.17192, section 2.3 with q one-hot).

        Raises:
            DraftError: the entry is malformed.
        """
        if self.spec.sampling.resolved_mode is VerifyMode.REJECTION:
            dists = tuple(DraftDistribution.point_mass(token) for token in entry.tokens)
            entry = replace(entry, draft_dists=dists)
        outcome = self.trie.add(entry)
        self.has_drafter = True
        if self.trie.num_nodes:
            self.num_missed_holds = 0
        return outcome

    def commit(self, tokens: TokenSequence[int]) -> tuple[list[int], Finish, int]:
        """Append verified tokens, cut at the first stop token or limit.

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
            self.state = SequenceState.FINISHED
            return kept, finish, self.trie.num_nodes
        return kept, finish, self.trie.commit(kept).dropped
