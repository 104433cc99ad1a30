"""N-gram proposals (prompt lookup): draft tokens copied from an earlier place in the text itself.

Responsible for: finding where the newest tokens occurred before, how likely the same continuation follows again, and
merging an n-gram proposal into a drafter's tree. Texts that quote their prompt, code, and small models in a loop repeat
themselves; a copied token costs no pass and no round trip (prompt lookup decoding, Saxena 2023; LLMA, 2304.04487).

Deliberately does not know: the target, drafters, sequences, time.

Called by: the verifier, which adds n-gram proposals to the drafts of its own trie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.draft_tree import DraftTree

MIN_MATCH = 3
"""Length of the n-gram that must occur twice. After two tokens, the same one follows in less than half of all cases."""

MAX_MATCH = 32
"""A longer match counts as this long."""

MAX_TEXT = 32768
"""Tokens in the index; when the text grows beyond it, the older half is forgotten."""

_MAX_PLACES = 8  # earlier occurrences that are compared, the newest first

# P(the same token follows again), by the length of the match: measured on greedy texts of SmolLM2-135M.
_PRIOR = {3: 0.54, 4: 0.69, 5: 0.8, 6: 0.85, 8: 0.89, 12: 0.92, 16: 0.95}
_PRIOR_TRIALS = 16.0
_HALF_LIFE = 1024.0  # trials of one length


@dataclass(frozen=True, slots=True)
class NgramProposal:
    """A continuation copied from an earlier place in the text.

    Attributes:
        match: how many of the newest tokens occur before that place too, from MIN_MATCH to MAX_MATCH.
        tokens: the tokens that followed at that place, at least one.
        path_acceptances: for each token, the probability that it and all tokens before it are accepted.
    """

    match: int
    tokens: tuple[int, ...]
    path_acceptances: tuple[float, ...]


class MatchAcceptance:
    """The probability that a match continues as before, by the length of the match; learned from committed tokens.

    A match that continued for `i` tokens is a match that is `i` tokens longer, so one curve serves whole continuations.
    """

    def __init__(self) -> None:
        self._decay = 2.0 ** (-1.0 / _HALF_LIFE)
        lengths = range(MAX_MATCH + 1)
        self._bucket_of = [
            max((bound for bound in _PRIOR if bound <= length), default=0) for length in lengths
        ]
        self._trials = dict.fromkeys(_PRIOR, _PRIOR_TRIALS)
        self._hits = {bound: _PRIOR_TRIALS * odds for bound, odds in _PRIOR.items()}

    def next(self, match: int) -> float:
        """P(the same token follows) after a match of at least MIN_MATCH tokens."""
        bucket = self._bucket_of[min(match, MAX_MATCH)]
        return self._hits[bucket] / self._trials[bucket]

    def path_acceptances(self, match: int, count: int) -> tuple[float, ...]:
        """P(the same i tokens follow), for i from 1 to `count`."""
        path_acceptance, path_acceptances = 1.0, []
        for length in range(match, match + count):
            path_acceptance *= self.next(length)
            path_acceptances.append(path_acceptance)
        return tuple(path_acceptances)

    def observe(self, proposal: NgramProposal, tokens: Sequence[int]) -> None:
        """Learn from the tokens that the target committed in place of a proposal, whether it was verified or not."""
        for length, (proposed, committed) in enumerate(
            zip(proposal.tokens, tokens, strict=False), start=proposal.match
        ):
            bucket = self._bucket_of[min(length, MAX_MATCH)]
            self._trials[bucket] = self._trials[bucket] * self._decay + 1.0
            self._hits[bucket] = self._hits[bucket] * self._decay + (proposed == committed)
            if proposed != committed:
                return


class TextIndex:
    """Where each n-gram of MIN_MATCH tokens occurred in the newest part of a text; constant work per token.

    The index takes about 200 bytes per token, for at most MAX_TEXT tokens.
    """

    def __init__(self) -> None:
        self._text: list[int] = []
        self._newest: dict[tuple[int, ...], int] = {}  # n-gram -> where its last occurrence ended
        self._older: list[int] = []  # by position: where the n-gram that ends there ended before, or -1

    def extend(self, tokens: Sequence[int]) -> None:
        """Add more of the text."""
        if len(self._text) + len(tokens) > MAX_TEXT:
            newest_part = [*self._text, *tokens][-(MAX_TEXT // 2) :]
            self._text, self._newest, self._older = [], {}, []
            self._index(newest_part)
        else:
            self._index(tokens)

    def _index(self, tokens: Sequence[int]) -> None:
        text, newest, older = self._text, self._newest, self._older
        for token in tokens:
            # An n-gram enters the index when a token follows it, so that the newest n-gram never finds itself.
            end = len(text)
            ngram = tuple(text[end - MIN_MATCH : end]) if end >= MIN_MATCH else None
            older.append(-1 if ngram is None else newest.get(ngram, -1))
            if ngram is not None:
                newest[ngram] = end
            text.append(token)

    def find(self) -> tuple[int, int] | None:
        """The longest match of the text's end with an earlier part; among equal ones, the newest.

        Returns:
            The length of the match, at most MAX_MATCH, and the position of the token that followed; None without a
            match.
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

    def propose(self, max_tokens: int, acceptance: MatchAcceptance) -> NgramProposal | None:
        """The tokens that followed the best match; where the text ends too early, its period is repeated."""
        found = self.find() if max_tokens > 0 else None
        if found is None:
            return None
        match, place = found
        tokens = self._text[place : place + max_tokens]
        period = len(self._text) - place
        while len(tokens) < max_tokens:
            tokens.append(tokens[len(tokens) - period])
        return NgramProposal(match, tuple(tokens), acceptance.path_acceptances(match, max_tokens))


def merge_proposal(tree: DraftTree, proposal: NgramProposal, max_nodes: int, max_depth: int) -> DraftTree:
    """A drafter's tree and an n-gram proposal as one tree.

    A node that both propose keeps the drafter's claim, and the larger of the two path acceptances.

    Args:
        tree: best path acceptance first; may be empty. None of its tokens was drawn.
        proposal: continues the same text.
        max_nodes: of the result; the likeliest stay.
        max_depth: of the n-gram proposal's part.
    """
    tokens, parents, depths = list(tree.tokens), list(tree.parents), list(tree.depths)
    path_acceptances, drafter_path_acceptances = list(tree.path_acceptances), list(tree.path_acceptances)
    claims = list(tree.claims or (None,) * len(tree))
    children = {
        (parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))
    }
    parent = -1
    for depth, (token, path_acceptance) in enumerate(
        zip(proposal.tokens[:max_depth], proposal.path_acceptances, strict=False), start=1
    ):
        node = children.get((parent, token))
        if node is None:
            node = len(tokens)
            tokens.append(token)
            parents.append(parent)
            depths.append(depth)
            path_acceptances.append(path_acceptance)
            drafter_path_acceptances.append(0.0)
            claims.append(None)
        else:
            path_acceptances[node] = max(path_acceptances[node], path_acceptance)
        parent = node
    # Along a path, path acceptances fall and depths rise, so that every head of this order is a tree.
    order = sorted(range(len(tokens)), key=lambda node: (-path_acceptances[node], depths[node], node))
    order = order[:max_nodes]
    new_index = {node: index for index, node in enumerate(order)}
    return DraftTree(
        tokens=tuple(tokens[node] for node in order),
        parents=tuple(-1 if parents[node] < 0 else new_index[parents[node]] for node in order),
        depths=tuple(depths[node] for node in order),
        path_acceptances=tuple(path_acceptances[node] for node in order),
        draft_dists=(None,) * len(order),
        claims=tuple(claims[node] for node in order),
        drafter_path_acceptances=tuple(drafter_path_acceptances[node] for node in order),
    )
