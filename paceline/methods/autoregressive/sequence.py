"""What an autoregressive drafter keeps of a sequence: its tokens, features still to run, and what it drafted last.

Pure data; filled by `paceline.methods.autoregressive.drafter`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from paceline.draft_layer import Rows, StableRow
from paceline.drafts import DraftEntry, SiblingDraws
from paceline.methods.feature_follower import FollowedSequence
from paceline.methods.sibling_chain import sibling_chain_entry
from paceline.methods.tree import GrowingTree


@dataclass(slots=True)
class DraftedChain:
    """A drafted chain that may be continued.

    Attributes:
        start: committed length that it continues.
        tokens: drafted so far.
        log_probs: of each token.
        state: layer output behind the last token, `[1, hidden]`.
        logits: draft logits of the next token, `[1, draft_vocab]`.
        draws: of each token, if tokens are drawn; `log_probs` is empty then.
    """

    start: int
    state: Tensor
    logits: Tensor
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    draws: list[SiblingDraws] = field(default_factory=list)

    def entry(self) -> DraftEntry:
        """The chain as a draft entry, with siblings if tokens were drawn."""
        if self.draws:
            return sibling_chain_entry(self.start, self.draws)
        return DraftEntry.chain(self.start, tuple(self.tokens), tuple(self.log_probs))


@dataclass(slots=True)
class DraftedTree:
    """A drafted tree that may be grown further.

    Attributes:
        start: committed length that it continues.
        nodes: the proposed nodes.
        branch: children that the next nodes to run propose.
        states: layer output of each row that was run, `[rows, hidden]`.
    """

    start: int
    nodes: GrowingTree
    branch: int
    states: Tensor


@dataclass(slots=True)
class AutoregressiveSequence(FollowedSequence):
    """State of a sequence: its tokens and features, its last stable row, and its last draft."""

    stable: StableRow | None = None  # absent before the first
    chain: DraftedChain | None = None
    tree: DraftedTree | None = None


@dataclass(frozen=True, slots=True)
class StableRows:
    """Rows of true features to be run in one pass.

    Attributes:
        states: their sequences.
        rows: rows of each sequence.
        left: features of each sequence that remain for a later pass.
        last: index of each sequence's last row, counted over all rows.
    """

    states: list[AutoregressiveSequence]
    rows: list[Rows]
    left: list[list[Tensor]]
    last: list[int]
