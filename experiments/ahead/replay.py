"""A drafter follows a text that is known, cycle by cycle, as it would follow the target that writes it.

Responsible for: committing what a cycle would commit, and comparing, where an outcome was foretold, what follows it
on the drafter's own states with what it drafts there from the target's features. Acceptance needs no target: in greedy
and coupled mode a draft is accepted as far as it is the text.

Deliberately does not know: time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from experiments.ahead.text import Text
from paceline.draft_tree import DraftTree
from paceline.methods.drafter import Drafter, DraftRequest, OutcomeRequest
from paceline.trie import DraftTrie


@dataclass(slots=True)
class Tally:
    """Counts over texts.

    Attributes:
        num_cycles: drafts that were verified.
        num_tokens: committed by them.
        num_cache_hits: cycles whose outcome had been drafted past.
        num_ahead: tokens that were accepted of what stood behind those outcomes.
        num_fresh: tokens that were accepted, at the same places, of drafts from true features.
        ahead_at: times that a token at depth i + 1 behind an outcome was accepted.
        fresh_at: the same of drafts from true features.
    """

    num_cycles: int = 0
    num_tokens: int = 0
    num_cache_hits: int = 0
    num_ahead: int = 0
    num_fresh: int = 0
    ahead_at: list[int] = field(default_factory=list)
    fresh_at: list[int] = field(default_factory=list)

    def add_hit(self, num_ahead: int, num_fresh: int) -> None:
        """Count an outcome that had been foretold."""
        self.num_cache_hits += 1
        self.num_ahead += num_ahead
        self.num_fresh += num_fresh
        for counts, reached in ((self.ahead_at, num_ahead), (self.fresh_at, num_fresh)):
            counts.extend([0] * (reached - len(counts)))
            for depth in range(reached):
                counts[depth] += 1


@dataclass(frozen=True, slots=True)
class Cycle:
    """What is drafted in a cycle: `length` tokens in a row and `max_nodes` in all, then `ahead` past `outcomes`."""

    length: int
    max_nodes: int
    outcomes: int
    ahead: int


def replay(drafter: Drafter, text: Text, cycle: Cycle, tally: Tally) -> None:
    """Follow a text to its end."""
    committed = text.num_prompt + 1  # the prompt's own step commits the first token
    drafter.open(1, text.tokens[:committed])
    drafter.feed(1, 0, text.features[: committed - 1])
    request = DraftRequest(1, cycle.length, cycle.max_nodes, text.sampling)
    past = OutcomeRequest(1, cycle.ahead, cycle.outcomes, 64, text.sampling)
    foretold: DraftTrie | None = None
    while committed < len(text.tokens) - cycle.length - cycle.ahead:
        (entry,) = drafter.draft([request])
        if entry is None:
            break
        trie = DraftTrie(text.tokens[:committed])
        trie.add(entry)
        fresh = num_accepted(trie.select_best(cycle.max_nodes, cycle.length), text.tokens[committed:])
        if foretold is not None and foretold.num_nodes:
            tree = foretold.select_best(cycle.max_nodes, cycle.ahead)
            tally.add_hit(num_accepted(tree, text.tokens[committed:]), fresh)
        (ahead,) = drafter.draft_outcomes([past])
        if ahead is not None and ahead.tokens:
            trie.add(ahead)
        step = text.tokens[committed : committed + fresh + 1]
        trie.commit(step)
        foretold = trie
        drafter.extend(1, committed, step)
        drafter.feed(1, committed - 1, text.features[committed - 1 : committed + len(step) - 1])
        committed += len(step)
        tally.num_cycles += 1
        tally.num_tokens += len(step)
    drafter.close(1)


def num_accepted(tree: DraftTree, text: Sequence[int]) -> int:
    """How far a tree is the text."""
    node, depth = -1, 0
    while depth < len(text):
        below = (
            i for i, (p, t) in enumerate(zip(tree.parents, tree.tokens, strict=True))
            if p == node and t == text[depth]
        )  # fmt: skip
        child = next(below, None)
        if child is None:
            break
        node, depth = child, depth + 1
    return depth
