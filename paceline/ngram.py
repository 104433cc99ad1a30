"""Drafts without a drafter: how the text went on the last time its newest tokens stood in it.

Responsible for: finding that place, what such a continuation is worth, and joining it with a drafter's tree. Texts that
quote their prompt, code, and small models in a loop repeat themselves; what is copied costs no pass and no round trip
(prompt lookup decoding, Saxena 2023; LLMA, 2304.04487).

Deliberately does not know: the target, drafters, sequences, time. Called by the verifier, which proposes next to its
own trie, whatever a drafter far away is doing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.drafts import DraftTree

MIN_MATCH = 3
"""Tokens that must stand in the text twice. After two, what followed comes again in less than half of all cases."""

MAX_MATCH = 32
"""Longer matches are taken for this long."""

MAX_TEXT = 32768
"""Tokens that are looked through; of a longer text the older half is forgotten."""

_MAX_PLACES = 8  # newest earlier places that are compared

# P(the next token is the one that followed last time), by the length of the match: greedy texts of SmolLM2-135M.
_PRIOR = {3: 0.54, 4: 0.69, 5: 0.8, 6: 0.85, 8: 0.89, 12: 0.92, 16: 0.95}
_PRIOR_TRIALS = 16.0
_HALF_LIFE = 1024.0  # trials of one length


@dataclass(frozen=True, slots=True)
class NgramProposal:
    """A continuation that the text has had before.

    Attributes:
        match: newest tokens that stood before it, from MIN_MATCH to MAX_MATCH.
        tokens: what followed them then, at least one.
        path_acceptances: per token the chance that it and all before it come again.
    """

    match: int
    tokens: tuple[int, ...]
    path_acceptances: tuple[float, ...]


class MatchAcceptance:
    """How likely a match goes on as it did before, by its length; learned from what the target did.

    A match that went on for `i` tokens is a match of `i` tokens more, so one curve gives whole continuations.
    """

    def __init__(self) -> None:
        self._decay = 2.0 ** (-1.0 / _HALF_LIFE)
        lengths = range(MAX_MATCH + 1)
        self._place = [max((bound for bound in _PRIOR if bound <= length), default=0) for length in lengths]
        self._trials = dict.fromkeys(_PRIOR, _PRIOR_TRIALS)
        self._hits = {bound: _PRIOR_TRIALS * odds for bound, odds in _PRIOR.items()}

    def next(self, match: int) -> float:
        """P(the next token comes again) after a match of at least MIN_MATCH tokens."""
        place = self._place[min(match, MAX_MATCH)]
        return self._hits[place] / self._trials[place]

    def path_acceptances(self, match: int, count: int) -> tuple[float, ...]:
        """P(the first i tokens come again), i from 1 to `count`."""
        path_acceptance, found = 1.0, []
        for length in range(match, match + count):
            path_acceptance *= self.next(length)
            found.append(path_acceptance)
        return tuple(found)

    def observe(self, proposal: NgramProposal, tokens: Sequence[int]) -> None:
        """Take in what the target committed where an n-gram proposal was to come, verified or not."""
        for length, (expected, came) in enumerate(
            zip(proposal.tokens, tokens, strict=False), start=proposal.match
        ):
            place = self._place[min(length, MAX_MATCH)]
            self._trials[place] = self._trials[place] * self._decay + 1.0
            self._hits[place] = self._hits[place] * self._decay + (expected == came)
            if expected != came:
                return


class TextIndex:
    """Where each run of MIN_MATCH tokens stood in the newest part of a text; constant work per token.

    Takes some 200 bytes a token, of at most MAX_TEXT.
    """

    def __init__(self) -> None:
        self._text: list[int] = []
        self._newest: dict[tuple[int, ...], int] = {}  # run of tokens -> where it last ended
        self._older: list[int] = []  # by place: where the run that ends there ended before, or -1

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in more of the text."""
        if len(self._text) + len(tokens) > MAX_TEXT:
            newest_part = [*self._text, *tokens][-(MAX_TEXT // 2) :]
            self._text, self._newest, self._older = [], {}, []
            self._enter(newest_part)
        else:
            self._enter(tokens)

    def _enter(self, tokens: Sequence[int]) -> None:
        text, newest, older = self._text, self._newest, self._older
        for token in tokens:
            # Entered once something follows it: the newest run never finds itself.
            end = len(text)
            run = tuple(text[end - MIN_MATCH : end]) if end >= MIN_MATCH else None
            older.append(-1 if run is None else newest.get(run, -1))
            if run is not None:
                newest[run] = end
            text.append(token)

    def find(self) -> tuple[int, int] | None:
        """The longest match of the text's end with an earlier part, of equals the newest.

        Returns:
            Its length, at most MAX_MATCH, and the place of what followed; None where there is none.
        """
        text = self._text
        length = len(text)
        place = self._newest.get(tuple(text[-MIN_MATCH:]), -1) if length > MIN_MATCH else -1
        best: tuple[int, int] | None = None
        for _ in range(_MAX_PLACES):
            if place < 0:
                break
            match = MIN_MATCH
            while match < min(MAX_MATCH, place) and text[place - match - 1] == text[length - match - 1]:
                match += 1
            if best is None or match > best[0]:
                best = match, place
            if match == MAX_MATCH:
                break
            place = self._older[place]
        return best

    def proposal(self, max_tokens: int, odds: MatchAcceptance) -> NgramProposal | None:
        """What followed the best match; a text that repeats itself without end goes on repeating."""
        found = self.find() if max_tokens > 0 else None
        if found is None:
            return None
        match, place = found
        tokens = self._text[place : place + max_tokens]
        period = len(self._text) - place
        while len(tokens) < max_tokens:
            tokens.append(tokens[len(tokens) - period])
        return NgramProposal(match, tuple(tokens), odds.path_acceptances(match, max_tokens))


def graft(tree: DraftTree, proposal: NgramProposal, max_nodes: int, max_depth: int) -> DraftTree:
    """A drafter's tree and an n-gram proposal as one tree.

    A node that both propose keeps what the drafter said of it, and the larger of the two chances.

    Args:
        tree: best path acceptance first; may be empty. No token of it was drawn.
        proposal: goes on from the same text.
        max_nodes: of the result; the likeliest stay.
        max_depth: of the n-gram proposal's part.
    """
    tokens, parents, depths = list(tree.tokens), list(tree.parents), list(tree.depths)
    path_acceptances, own = list(tree.path_acceptances), list(tree.path_acceptances)
    claims = list(tree.claims or (None,) * len(tree))
    children = {
        (parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))
    }
    node = -1
    for depth, (token, path_acceptance) in enumerate(
        zip(proposal.tokens[:max_depth], proposal.path_acceptances, strict=False), start=1
    ):
        at = children.get((node, token))
        if at is None:
            at = len(tokens)
            tokens.append(token)
            parents.append(node)
            depths.append(depth)
            path_acceptances.append(path_acceptance)
            own.append(0.0)
            claims.append(None)
        else:
            path_acceptances[at] = max(path_acceptances[at], path_acceptance)
        node = at
    # Along a path path acceptances fall and depths rise, so that every head of this order is a tree.
    order = sorted(range(len(tokens)), key=lambda node: (-path_acceptances[node], depths[node], node))[
        :max_nodes
    ]
    place = {node: rank for rank, node in enumerate(order)}
    return DraftTree(
        tokens=tuple(tokens[node] for node in order),
        parents=tuple(-1 if parents[node] < 0 else place[parents[node]] for node in order),
        depths=tuple(depths[node] for node in order),
        path_acceptances=tuple(path_acceptances[node] for node in order),
        draft_dists=(None,) * len(order),
        claims=tuple(claims[node] for node in order),
        drafter_path_acceptances=tuple(own[node] for node in order),
    )
