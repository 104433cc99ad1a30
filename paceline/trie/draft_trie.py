"""The trie itself: merges draft entries, and drops what a commit contradicts.

Responsible for: merging entries whatever their order, delay, duplication or loss, and moving the root down when tokens
are committed.

Deliberately does not know: tensors, the target, sampling modes, the network, calibration, epochs (the verifier drops
entries of old epochs before). One trie belongs to one sequence and one thread.

Called by: the verifier's step loop (add, select, commit).

Positions: with committed tokens ``y[0..n-1]`` the root is ``y[n-1]`` and its children propose position ``n``.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.draft_tree import DraftTree
from paceline.drafts import DraftEntry
from paceline.trie.early_entries import EarlyEntries
from paceline.trie.node import TrieNode, walk
from paceline.trie.selection import select_best, select_drawn_chain, select_drawn_tree


@dataclass(frozen=True, slots=True)
class AddResult:
    """What became of an entry's tokens: the first five counts add up to ``len(entry.tokens)``.

    Attributes:
        added: new nodes.
        merged: tokens that were in the trie already.
        matched: leading tokens of a late entry that equal tokens committed since.
        stale: tokens that contradict the committed text, or start outside the window.
        ahead: tokens kept until the committed length reaches the entry's start.
        evicted: nodes (of any entry) that left to keep the trie bounded.
    """

    added: int = 0
    merged: int = 0
    matched: int = 0
    stale: int = 0
    ahead: int = 0
    evicted: int = 0


@dataclass(frozen=True, slots=True)
class CommitResult:
    """What a commit did to the trie.

    Attributes:
        matched: how many of the committed tokens were in the trie, counted from the root.
        dropped: nodes that were thrown away because they are not under the committed path.
        attached: nodes added from entries that had started ahead of the committed length.
    """

    matched: int
    dropped: int
    attached: int


class DraftTrie:
    """Proposed continuations of one sequence.

    Merging: a confidence that was sent replaces one that was not; of two, the larger stays. The rule is commutative,
    associative and idempotent, so duplicated or reordered messages lead to the same trie. The drafter's claim
    (`DraftClaim`) stays together with the confidence.

    Drawn tokens: how a token was drawn stays as its first entry said. Drawn tokens keep only the confidence that was
    stated before the draw, because the choice of what to verify must not depend on the drawn values.

    Args:
        committed: the committed tokens, at least one; only the last ``window`` are kept.
        vocab_size: when given, entries with a token outside ``[0, vocab_size)`` are refused.
        max_nodes: bound on the nodes and, separately, on the tokens of entries that start ahead. Above it the nodes
            with the lowest path acceptance are evicted.
        window: how far behind (or ahead of) the committed length an entry may start.
    """

    def __init__(
        self,
        committed: Sequence[int],
        *,
        vocab_size: int | None = None,
        max_nodes: int = 1024,
        window: int = 256,
    ) -> None:
        if not committed:
            raise ValueError("committed must hold at least one token: the root")
        if max_nodes < 1 or window < 1:
            raise ValueError("max_nodes and window must be at least 1")
        self._length = len(committed)
        self._tail = list(committed[-window:])
        self._vocab_size = vocab_size
        self._node_limit = max_nodes
        self._window = window
        self._root = TrieNode.new_root()
        self._num_nodes = 0
        self._next_order = 1
        self._early = EarlyEntries(max_nodes)

    @property
    def committed_length(self) -> int:
        """How many tokens the sequence has committed."""
        return self._length

    @property
    def num_nodes(self) -> int:
        """Nodes of the trie without the root."""
        return self._num_nodes

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node; 0 when the trie is empty."""
        return max((depth for _, depth, _ in walk(self._root)), default=0)

    def add(self, entry: DraftEntry) -> AddResult:
        """Merge an entry.

        An entry may start behind the committed length (late): the part that equals committed tokens is skipped. It may
        start ahead of the committed length: the trie does not know the tokens in between, so the entry waits until a
        commit reaches its start. A drafter that drafts ahead should therefore send whole paths from a committed length.

        Raises:
            DraftError: lengths disagree, parents are not topological, a number is not finite or out of range.
        """
        entry.check(self._node_limit, self._vocab_size)
        num_tokens = len(entry.tokens)
        if entry.start > self._length:
            if entry.start - self._length > self._window:
                return AddResult(stale=num_tokens)
            return AddResult(ahead=num_tokens, evicted=self._early.add(entry)) if num_tokens else AddResult()
        if entry.start < self._length - self._window:
            return AddResult(stale=num_tokens)
        return self._attach(entry)

    def commit(self, tokens: Sequence[int]) -> CommitResult:
        """Append committed tokens and move the root down their path; all nodes outside the path's end are dropped."""
        root: TrieNode | None = self._root
        matched = 0
        for token in tokens if self._num_nodes else ():
            root = root.children.get(token) if root is not None else None
            if root is None:
                break
            matched += 1
        before = self._num_nodes
        if root is None:
            self._root = TrieNode.new_root()
            self._num_nodes = 0
        elif root is not self._root:
            root.parent = None
            self._root = root
            self._num_nodes = sum(1 for _ in walk(root))
        dropped = before - self._num_nodes - matched
        self._length += len(tokens)
        self._tail.extend(tokens)
        if len(self._tail) > 2 * self._window:
            del self._tail[: -self._window]
        return CommitResult(matched, dropped, self._attach_due() if self._early.num_tokens else 0)

    def clear(self) -> int:
        """Drop every proposed token, waiting entries included; returns how many nodes there were."""
        dropped = self._num_nodes
        self._root = TrieNode.new_root()
        self._num_nodes = 0
        self._early.clear()
        return dropped

    def select_best(self, max_nodes: int, max_depth: int) -> DraftTree:
        """The nodes with the highest path acceptance; see `selection.select_best`."""
        return select_best(self._root, max_nodes, max_depth)

    def select_drawn_tree(self, max_nodes: int, max_depth: int) -> DraftTree:
        """The first-arrived entry's nodes in the order of their draws; see `selection.select_drawn_tree`."""
        return select_drawn_tree(self._root, max_nodes, max_depth)

    def select_drawn_chain(self, max_depth: int) -> DraftTree:
        """The path of first-arrived nodes and first draws; see `selection.select_drawn_chain`."""
        return select_drawn_chain(self._root, max_depth)

    def _attach(self, entry: DraftEntry) -> AddResult:
        """Add an entry that starts at or before the committed length."""
        root, length = self._root, self._length
        tail, offset = self._tail, self._length - len(self._tail)
        parents, confidences, claims = entry.parents, entry.usable_confidences(), entry.claims()
        # Where each token of the entry ended up: at a node; at a committed token (then the position after it); nowhere.
        places: list[TrieNode | int | None] = []
        added = merged = matched = stale = 0
        for index, token in enumerate(entry.tokens):
            parent = parents[index]
            place = entry.start if parent < 0 else places[parent]
            if type(place) is int:
                if place < length:
                    if tail[place - offset] == token:
                        places.append(place + 1)
                        matched += 1
                    else:
                        places.append(None)
                        stale += 1
                    continue
                place = root
            if place is None:
                places.append(None)
                stale += 1
                continue
            assert isinstance(place, TrieNode)
            draws = entry.draft_dists[index] if entry.draft_dists is not None else None
            node = place.children.get(token)
            if node is None:
                node = TrieNode(token, place, confidences[index], draws, self._next_order)
                node.claim = claims[index]
                self._next_order += 1
                place.children[token] = node
                added += 1
            else:
                confidence = confidences[index]
                if draws is not None or node.draws is not None or confidence is None:
                    pass  # a drawn token stays as its first entry said
                elif node.confidence is None or confidence > node.confidence:
                    node.confidence, node.claim = confidence, claims[index]
                merged += 1
            places.append(node)
        self._num_nodes += added
        evicted = self._evict() if self._num_nodes > self._node_limit else 0
        return AddResult(added, merged, matched, stale, 0, evicted)

    def _attach_due(self) -> int:
        """Add the waiting entries whose start the committed length has reached; returns the nodes added."""
        attached = 0
        while (entry := self._early.pop_due(self._length)) is not None:
            if entry.start >= self._length - self._window:
                attached += self._attach(entry).added
        return attached

    def _evict(self) -> int:
        """Remove the nodes with the lowest path acceptance, leaves first, until an eighth of the limit is free."""
        excess = self._num_nodes - (self._node_limit - self._node_limit // 8)
        ranked = [
            (path_acceptance, -depth, -node.order, node) for node, depth, path_acceptance in walk(self._root)
        ]
        for _, _, _, node in heapq.nsmallest(excess, ranked):
            assert node.parent is not None
            assert not node.children
            del node.parent.children[node.token]
        self._num_nodes -= excess
        return excess
