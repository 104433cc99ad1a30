"""What an independent drafter keeps of a sequence: its text in both vocabularies, and the chain drafted behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.drafts import DraftEntry, SiblingDraws
from paceline.methods.sibling_chain import sibling_chain_entry
from paceline.methods.whole_model.draft_text import DraftText
from paceline.methods.whole_model.text_follower import FollowedText
from paceline.target import common_prefix


@dataclass(slots=True)
class IndependentSequence(FollowedText):
    """A sequence's committed tokens, and the chain drafted behind them.

    Attributes:
        own: the same text in the ids of the drafter's model.
        num_cached: leading ids of `text` whose keys and values are in the slot.
        chain: drafted, the target's ids.
        own_chain: the same tokens in the drafter's ids.
        draws: of each token of the chain, if tokens are drawn; `log_probs` is empty then.
    """

    own: DraftText
    num_cached: int = 0
    chain: list[int] = field(default_factory=list)
    own_chain: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    draws: list[SiblingDraws] = field(default_factory=list)

    def entry(self) -> DraftEntry:
        """The chain as a draft entry, with siblings if tokens were drawn."""
        if self.draws:
            return sibling_chain_entry(len(self.tokens), self.draws)
        return DraftEntry.chain(len(self.tokens), tuple(self.chain), tuple(self.log_probs))

    @property
    def text(self) -> list[int]:
        """What the drafter's model reads: the committed text and the chain."""
        return self.own.ids + self.own_chain

    @property
    def next_position(self) -> int:
        """The target's position of the chain's next token."""
        return len(self.tokens) + len(self.chain)

    def commit(self, tokens: Sequence[int]) -> None:
        """Take in committed tokens; correctly drafted tokens stay in the cache.

        With another tokenizer a token may also change how the text before it is encoded. The cache is then valid up to
        the first id that changed.
        """
        agreed = common_prefix(tokens, self.chain)
        known = len(self.own.ids)
        self.tokens.extend(tokens)
        kept = self.own.extend(tokens)
        drafted = 0
        if kept == known:
            drafted = common_prefix(self.own.ids[known:], self.own_chain)
        if agreed == len(tokens) and kept == known and len(self.own.ids) == known + drafted:
            self.chain, self.own_chain = self.chain[agreed:], self.own_chain[drafted:]
            self.log_probs, self.draws = self.log_probs[agreed:], self.draws[agreed:]
            return
        self.chain, self.own_chain, self.log_probs, self.draws = [], [], [], []
        # The first id that differs, and all after it, leave the cache.
        self.num_cached = min(self.num_cached, kept + drafted)
