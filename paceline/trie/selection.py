"""Which part of a draft trie a step verifies: three selections for three kinds of verification mode.

Responsible for: choosing nodes under a budget, and building the `DraftTree` of the chosen nodes.

Deliberately does not know: verification modes, the target, how nodes came into the trie.

Called by: `DraftTrie.select_best`, `select_drawn_tree` and `select_drawn_chain`.
"""

from __future__ import annotations

import heapq

from paceline.draft_tree import EMPTY_TREE, DraftTree
from paceline.drafts import DraftClaim, SiblingDraws
from paceline.trie.node import DEFAULT_CONFIDENCE, TrieNode


def select_best(root: TrieNode, max_nodes: int, max_depth: int) -> DraftTree:
    """The at most ``max_nodes`` nodes with the highest path acceptance, none deeper than ``max_depth``.

    Path acceptance falls along a path, so the chosen nodes always include their parents. They maximise the expected
    number of accepted tokens (DSpark, arXiv 2607.05147, Algorithm 1 sorts the same way). Of equal nodes the
    shallower comes first, then the older.
    """
    if max_nodes <= 0 or max_depth <= 0 or not root.children:
        return EMPTY_TREE
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    path_acceptances: list[float] = []
    draws: list[SiblingDraws | None] = []
    claims: list[DraftClaim | None] = []
    heap: list[tuple[float, int, int, int, TrieNode]] = [
        (-child.known_confidence, 1, child.order, -1, child) for child in root.children.values()
    ]
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
                path_acceptance = negative_path_acceptance * child.known_confidence
                heapq.heappush(heap, (path_acceptance, depth + 1, child.order, index, child))
    return DraftTree(
        tuple(tokens), tuple(parents), tuple(depths), tuple(path_acceptances), tuple(draws), tuple(claims)
    )


def select_drawn_tree(root: TrieNode, max_nodes: int, max_depth: int) -> DraftTree:
    """The at most ``max_nodes`` nodes that the first-arrived entry proposes, none deeper than ``max_depth``.

    This selection is for modes that verify drawn tokens. There, whether a token is verified may depend on the tokens
    above it, but not on its own value.

    Where the first entry drew the children of a node, they are taken in the order of their draws. The path acceptance
    of a draw follows from its depth, its number among the draws and the confidence that was stated before the draw
    (DSpark, arXiv 2607.05147, section 4); without such a confidence it is one half. It is never below the path
    acceptances of the nodes under it. So those nodes, whose confidences may depend on the drawn value, cannot decide
    whether it is taken.

    Where the first entry did not draw the children, all children that were not drawn take part, likeliest first. Such a
    token is a function of the text before it, so its value may decide.
    """
    if max_nodes <= 0 or max_depth <= 0 or not root.children:
        return EMPTY_TREE
    picked: list[tuple[TrieNode, int, int, float]] = []  # node, parent's index, depth, path acceptance
    claims: list[DraftClaim | None] = []
    heap: list[tuple[float, int, int, int, int, TrieNode]] = []
    num_pushed = 0

    def push(node: TrieNode, draw: int, depth: int, parent: int, path_acceptance: float) -> None:
        nonlocal num_pushed
        num_pushed += 1
        heapq.heappush(heap, (-path_acceptance, depth, num_pushed, parent, draw, node))

    def push_children(node: TrieNode, depth: int, parent: int, path_acceptance: float) -> None:
        if not node.children:
            return
        first = node.first_arrived_child()
        if first.draws is not None:
            push_draw(node, first.draws, 0, depth, parent, path_acceptance)
            return
        for child in node.children.values():
            if child.draws is None:
                push(child, -1, depth, parent, path_acceptance * child.known_confidence)

    def push_draw(
        node: TrieNode, draws: SiblingDraws, draw: int, depth: int, parent: int, path_acceptance: float
    ) -> None:
        child = node.children.get(draws.tokens[draw]) if draw < len(draws.tokens) else None
        if child is not None and child.draws is draws:
            path_acceptance = path_acceptance * child.known_confidence * DEFAULT_CONFIDENCE**draw
            push(child, draw, depth, parent, path_acceptance)

    push_children(root, 1, -1, 1.0)
    while heap and len(picked) < max_nodes:
        negative_path_acceptance, depth, _, parent, draw, node = heapq.heappop(heap)
        path_acceptance, index = -negative_path_acceptance, len(picked)
        picked.append((node, parent, depth, path_acceptance))
        claims.append(node.claim if draw <= 0 else None)
        if draw >= 0:
            assert node.draws is not None
            above = picked[parent][0] if parent >= 0 else root
            above_acceptance = picked[parent][3] if parent >= 0 else 1.0
            push_draw(above, node.draws, draw + 1, depth, parent, above_acceptance)
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


def select_drawn_chain(root: TrieNode, max_depth: int) -> DraftTree:
    """The path of first-arrived nodes; among drawn siblings, the first draw.

    This selection is for modes that verify chains of drawn tokens. As in `select_drawn_tree`, no value of a drawn
    token decides what is verified.
    """
    nodes: list[TrieNode] = []
    path_acceptances: list[float] = []
    node, path_acceptance = root, 1.0
    while len(nodes) < max_depth and node.children:
        node = node.first_arrived_child()
        if node.draws is not None and node.token != node.draws.tokens[0]:
            break
        path_acceptance *= node.confidence_before_draw
        nodes.append(node)
        path_acceptances.append(path_acceptance)
    return DraftTree(
        tuple(node.token for node in nodes),
        tuple(range(-1, len(nodes) - 1)),
        tuple(range(1, len(nodes) + 1)),
        tuple(path_acceptances),
        tuple(node.draws for node in nodes),
    )
