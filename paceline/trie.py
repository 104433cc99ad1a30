"""The draft trie: every proposed continuation of one sequence, rooted at its last committed token.

Responsible for: merging draft entries whatever their order, delay, duplication or loss, walking the root down
when tokens are committed, and handing out the best sub-trie under a budget.

Deliberately does not know: tensors, the target, sampling modes, the network, epochs (a frame with an old
epoch never gets here) or how confidences were calibrated. A trie belongs to one sequence and one thread.

Called by: the verifier's step loop (add, select, commit).

Positions: with committed tokens ``y[0..n-1]`` the root is ``y[n-1]`` and its children propose position ``n``.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.drafts import EMPTY_TREE, DraftClaim, DraftEntry, DraftError, DraftTree, DrawRule, SiblingDraws

__all__ = [
    "DEFAULT_CONFIDENCE",
    "EMPTY_TREE",
    "AddResult",
    "CommitResult",
    "DraftClaim",
    "DraftEntry",
    "DraftError",
    "DraftTree",
    "DraftTrie",
    "DrawRule",
    "SiblingDraws",
]

DEFAULT_CONFIDENCE = 0.5
"""Stands in for a confidence the drafter did not send; a known value replaces it when one arrives."""


@dataclass(frozen=True, slots=True)
class AddResult:
    """Where an entry's tokens went: the first five add up to ``len(entry.tokens)``.

    Attributes:
        added: new nodes.
        merged: tokens that were in the trie already.
        matched: the late part, equal to tokens that are committed by now.
        stale: not under the committed path, or out of reach (start before the window, or too far ahead).
        ahead: parked until the committed length reaches the entry's start.
        evicted: nodes (of any entry) that had to leave to keep the trie bounded.
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
        dropped: nodes that fell away because they do not lie under the committed path.
        attached: nodes of parked entries that became live.
    """

    matched: int
    dropped: int
    attached: int


class _Node:
    """One proposed token. ``confidence`` and ``claim`` are None while no drafter has said anything about it."""

    __slots__ = ("children", "claim", "confidence", "draws", "order", "parent", "token")

    def __init__(
        self,
        token: int,
        parent: _Node | None,
        confidence: float | None,
        draws: SiblingDraws | None,
        order: int,
    ) -> None:
        self.token = token
        self.parent = parent
        self.confidence = confidence
        self.claim: DraftClaim | None = None
        self.draws = draws
        self.order = order
        self.children: dict[int, _Node] = {}


class DraftTrie:
    """Proposed continuations of one sequence.

    Merging: a confidence that was sent beats one that was not; between two, the larger stays. The rule is
    commutative, associative and idempotent, so duplicated or reordered messages lead to the same trie. What the drafter
    said of a token itself (`DraftClaim`) goes with the confidence that stays. How a
    token was drawn stays as its first entry said. Of drawn tokens only that confidence is kept which was said before
    they were drawn: what is verified must not depend on which were.

    Args:
        committed: the committed tokens, at least one; only the last ``window`` are kept.
        vocab_size: when given, entries with a token outside ``[0, vocab_size)`` are refused.
        max_nodes: bound on live nodes and, separately, on parked nodes. Above it the lowest path acceptances leave.
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
        self._root = _Node(-1, None, None, None, 0)
        self._num_nodes = 0
        self._next_order = 1
        self._parked: list[DraftEntry] = []
        self._num_parked = 0

    @property
    def committed_length(self) -> int:
        """How many tokens the sequence has committed."""
        return self._length

    @property
    def num_nodes(self) -> int:
        """Live nodes, the root not counted."""
        return self._num_nodes

    @property
    def num_parked(self) -> int:
        """Tokens of entries that start ahead of the committed length."""
        return self._num_parked

    @property
    def max_depth(self) -> int:
        """Depth of the deepest live node; 0 when the trie is empty."""
        deepest = 0
        for _, depth, _ in self._walk(self._root):
            deepest = max(deepest, depth)
        return deepest

    def add(self, entry: DraftEntry) -> AddResult:
        """Merge an entry.

        An entry may start behind the committed length (late): the part equal to committed tokens is skipped.
        It may start ahead of it: the trie cannot know the tokens in between, so the entry waits until a
        commit reaches its start. A drafter that drafts ahead therefore sends whole paths from a length that
        is committed.

        Raises:
            DraftError: lengths disagree, parents are not topological, a number is not finite or out of range.
        """
        entry.check(self._node_limit, self._vocab_size)
        num_tokens = len(entry.tokens)
        if entry.start > self._length:
            if entry.start - self._length > self._window:
                return AddResult(stale=num_tokens)
            return self._park(entry) if num_tokens else AddResult()
        if entry.start < self._length - self._window:
            return AddResult(stale=num_tokens)
        return self._attach(entry)

    def commit(self, tokens: Sequence[int]) -> CommitResult:
        """Append committed tokens and walk the root down; everything not under the new root is dropped."""
        root: _Node | None = self._root
        matched = 0
        for token in tokens if self._num_nodes else ():
            root = root.children.get(token) if root is not None else None
            if root is None:
                break
            matched += 1
        before = self._num_nodes
        if root is None:
            self._root = _Node(-1, None, None, None, 0)
            self._num_nodes = 0
        elif root is not self._root:
            root.parent = None
            self._root = root
            self._num_nodes = sum(1 for _ in self._walk(root))
        dropped = before - self._num_nodes - matched
        self._length += len(tokens)
        self._tail.extend(tokens)
        if len(self._tail) > 2 * self._window:
            del self._tail[: -self._window]
        return CommitResult(matched, dropped, self._unpark() if self._parked else 0)

    def select(self, max_nodes: int, max_depth: int) -> DraftTree:
        """The at most ``max_nodes`` nodes of highest path_acceptance, none deeper than ``max_depth``.

        Path acceptance falls along a path, so the highest path acceptances are closed under parents, and they
        maximise the
        expected number of accepted tokens (DSpark, arXiv 2607.05147, Algorithm 1 sorts the same way). Ties
        go to the shallower, then the older node.
        """
        if max_nodes <= 0 or max_depth <= 0 or not self._num_nodes:
            return EMPTY_TREE
        tokens: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        path_acceptances: list[float] = []
        draws: list[SiblingDraws | None] = []
        claims: list[DraftClaim | None] = []
        heap: list[tuple[float, int, int, int, _Node]] = []
        for child in self._root.children.values():
            heap.append((-_confidence(child), 1, child.order, -1, child))
        heapq.heapify(heap)
        while heap and len(tokens) < max_nodes:
            negative_path_acceptance, depth, _, parent, node = heapq.heappop(heap)
            index = len(tokens)
            tokens.append(node.token)
            parents.append(parent)
            depths.append(depth)
            path_acceptances.append(-negative_path_acceptance)
            draws.append(node.draws)
            claims.append(node.claim)
            if depth < max_depth:
                for child in node.children.values():
                    path_acceptance = negative_path_acceptance * _confidence(child)
                    heapq.heappush(heap, (path_acceptance, depth + 1, child.order, index, child))
        return DraftTree(
            tuple(tokens), tuple(parents), tuple(depths), tuple(path_acceptances), tuple(draws), tuple(claims)
        )

    def select_first(self, max_nodes: int, max_depth: int) -> DraftTree:
        """The at most ``max_nodes`` nodes that the entry which came first proposes, none deeper than ``max_depth``.

        For modes that verify what was drawn: there, whether a token is verified may depend on the tokens above it, but
        not on its own value. So where the first entry to reach a node drew its children, they are taken in the order of
        their draws, and a draw's place among all nodes follows from its depth, its number and what was said of its
        position before it was drawn (DSpark, arXiv 2607.05147, section 4), one half where nothing was: its path
        acceptance is
        never below those of nodes under it, so that none of these, whose confidences may depend on its value, has a say
        in whether it is taken. Where the first entry did not draw, all children that were not drawn take part,
        likeliest first: a token that is a function of the text before it may be chosen by its value.
        """
        if max_nodes <= 0 or max_depth <= 0 or not self._num_nodes:
            return EMPTY_TREE
        picked: list[tuple[_Node, int, int, float]] = []  # node, parent's index, depth, path acceptance
        claims: list[DraftClaim | None] = []
        heap: list[tuple[float, int, int, int, int, _Node]] = []
        tick = 0

        def push(node: _Node, draw: int, depth: int, parent: int, path_acceptance: float) -> None:
            nonlocal tick
            tick += 1
            heapq.heappush(heap, (-path_acceptance, depth, tick, parent, draw, node))

        def push_children(node: _Node, depth: int, parent: int, path_acceptance: float) -> None:
            if not node.children:
                return
            first = min(node.children.values(), key=lambda child: child.order)
            if first.draws is not None:
                push_draw(node, first.draws, 0, depth, parent, path_acceptance)
                return
            for child in node.children.values():
                if child.draws is None:
                    push(child, -1, depth, parent, path_acceptance * _confidence(child))

        def push_draw(
            node: _Node, draws: SiblingDraws, draw: int, depth: int, parent: int, path_acceptance: float
        ) -> None:
            child = node.children.get(draws.tokens[draw]) if draw < len(draws.tokens) else None
            if child is not None and child.draws is draws:
                push(
                    child,
                    draw,
                    depth,
                    parent,
                    path_acceptance * _confidence(child) * DEFAULT_CONFIDENCE**draw,
                )

        push_children(self._root, 1, -1, 1.0)
        while heap and len(picked) < max_nodes:
            negative_path_acceptance, depth, _, parent, draw, node = heapq.heappop(heap)
            path_acceptance, index = -negative_path_acceptance, len(picked)
            picked.append((node, parent, depth, path_acceptance))
            claims.append(node.claim if draw <= 0 else None)
            if draw >= 0:
                assert node.draws is not None
                above = picked[parent][0] if parent >= 0 else self._root
                base = picked[parent][3] if parent >= 0 else 1.0
                push_draw(above, node.draws, draw + 1, depth, parent, base)
            is_repeat = draw > 0 and node.draws is not None and node.token in node.draws.tokens[:draw]
            if depth < max_depth and not is_repeat:
                push_children(node, depth + 1, index, path_acceptance)
        return DraftTree(
            tuple(node.token for node, *_ in picked),
            tuple(parent for _, parent, _, _ in picked),
            tuple(depth for *_, depth, _ in picked),
            tuple(path_acceptance for *_, path_acceptance in picked),
            tuple(node.draws for node, *_ in picked),
            tuple(claims) if any(claims) else (),
        )

    def select_chain(self, max_depth: int) -> DraftTree:
        """The path of first-arrived nodes; of drawn siblings the first draw.

        For modes that verify chains of draws: as in `select_first`, no value of a drawn token has a say in it.
        """
        nodes: list[_Node] = []
        path_acceptances: list[float] = []
        node, path_acceptance = self._root, 1.0
        while len(nodes) < max_depth and node.children:
            node = min(node.children.values(), key=lambda child: child.order)
            if node.draws is not None and node.token != node.draws.tokens[0]:
                break
            path_acceptance *= DEFAULT_CONFIDENCE if node.draws is not None else _confidence(node)
            nodes.append(node)
            path_acceptances.append(path_acceptance)
        return DraftTree(
            tuple(node.token for node in nodes),
            tuple(range(-1, len(nodes) - 1)),
            tuple(range(1, len(nodes) + 1)),
            tuple(path_acceptances),
            tuple(node.draws for node in nodes),
        )

    def clear(self) -> int:
        """Drop every proposed token, parked ones included; returns how many live nodes there were."""
        dropped = self._num_nodes
        self._root = _Node(-1, None, None, None, 0)
        self._num_nodes = 0
        self._parked, self._num_parked = [], 0
        return dropped

    def _attach(self, entry: DraftEntry) -> AddResult:
        """Hang an entry whose start is committed below the root."""
        root, length = self._root, self._length
        tail, offset = self._tail, self._length - len(self._tail)
        parents, draws, confidences = entry.parents, entry.draft_dists, entry.known_confidences()
        claims = entry.claims()
        # Where each token of the entry ended up: a node, or (still among committed tokens) the next position,
        # or nowhere.
        places: list[_Node | int | None] = []
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
            assert isinstance(place, _Node)
            drawn = draws[index] if draws is not None else None
            if drawn is None:
                confidence = confidences[index]
            else:
                is_said = drawn.confidence is not None
                confidence = (
                    (entry.confidences[index] if entry.confidences else drawn.confidence) if is_said else None
                )
            node = place.children.get(token)
            if node is None:
                node = _Node(token, place, confidence, drawn, self._next_order)
                node.claim = claims[index]
                self._next_order += 1
                place.children[token] = node
                added += 1
            else:
                is_drawn = drawn is not None or node.draws is not None
                if confidence is None or is_drawn:
                    pass  # what was drawn stays as its first entry said
                elif node.confidence is None or confidence > node.confidence:
                    node.confidence, node.claim = confidence, claims[index]
                merged += 1
            places.append(node)
        self._num_nodes += added
        evicted = self._evict() if self._num_nodes > self._node_limit else 0
        return AddResult(added, merged, matched, stale, 0, evicted)

    def _park(self, entry: DraftEntry) -> AddResult:
        """Keep an entry that starts ahead; when there are too many, those that start furthest ahead leave."""
        num_tokens = len(entry.tokens)
        for other in self._parked:
            same_path = (other.start, other.tokens, other.parents) == (
                entry.start,
                entry.tokens,
                entry.parents,
            )
            if same_path and (other.confidences, other.log_probs) == (entry.confidences, entry.log_probs):
                return AddResult(ahead=num_tokens)
        self._parked.append(entry)
        self._parked.sort(key=lambda parked: parked.start)
        self._num_parked += num_tokens
        evicted = 0
        while self._num_parked > self._node_limit:
            size = len(self._parked.pop().tokens)
            self._num_parked -= size
            evicted += size
        return AddResult(ahead=num_tokens, evicted=evicted)

    def _unpark(self) -> int:
        """Attach the parked entries whose start the committed length has reached; return the nodes added."""
        attached = 0
        while self._parked and self._parked[0].start <= self._length:
            entry = self._parked.pop(0)
            self._num_parked -= len(entry.tokens)
            if entry.start >= self._length - self._window:
                attached += self._attach(entry).added
        return attached

    def _evict(self) -> int:
        """Remove the lowest path acceptances, leaves first, until an eighth of the room is free."""
        excess = self._num_nodes - (self._node_limit - self._node_limit // 8)
        ranked = [
            (path_acceptance, -depth, -node.order, node)
            for node, depth, path_acceptance in self._walk(self._root)
        ]
        for _, _, _, node in heapq.nsmallest(excess, ranked):
            assert node.parent is not None
            assert not node.children
            del node.parent.children[node.token]
        self._num_nodes -= excess
        return excess

    @staticmethod
    def _walk(root: _Node) -> Iterator[tuple[_Node, int, float]]:
        """Every node below ``root`` with depth and path acceptance, one half a step for drawn tokens, parents first."""
        stack = [(child, 1, _undrawn_confidence(child)) for child in root.children.values()]
        while stack:
            node, depth, path_acceptance = stack.pop()
            yield node, depth, path_acceptance
            for child in node.children.values():
                stack.append((child, depth + 1, path_acceptance * _undrawn_confidence(child)))


def _undrawn_confidence(node: _Node) -> float:
    return DEFAULT_CONFIDENCE if node.draws is not None else _confidence(node)


def _confidence(node: _Node) -> float:
    return DEFAULT_CONFIDENCE if node.confidence is None else node.confidence
