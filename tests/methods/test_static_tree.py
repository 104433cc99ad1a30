"""The greedy tree: the most valuable of all trees of its size, whole paths, cut where it is told to be."""

from __future__ import annotations

import itertools
import math

import pytest

from paceline.methods.static_tree import StaticTree, prior_accuracies, search_tree

ACCURACIES = ((0.6, 0.2, 0.1), (0.5, 0.15, 0.12), (0.4, 0.1, 0.05))


def paths(tree: StaticTree) -> list[tuple[int, ...]]:
    """Ranks along the way to each node."""
    found: list[tuple[int, ...]] = []
    for parent, head, rank in zip(tree.parents, tree.heads, tree.ranks, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), rank))
        assert len(found[-1]) == head + 1
    return found


def value(path: tuple[int, ...]) -> float:
    return math.prod(ACCURACIES[head][rank] for head, rank in enumerate(path))


@pytest.mark.parametrize("max_nodes", [1, 2, 5, 9, 17, 39])
@pytest.mark.parametrize("max_depth", [1, 2, 3, 5])
def test_it_holds_the_most_valuable_nodes(max_nodes: int, max_depth: int) -> None:
    """A node is never worth more than its parent, so the best tree is the set of the best nodes."""
    tree = paths(search_tree(ACCURACIES, max_nodes, max_depth))
    everything = [
        path
        for depth in range(1, min(max_depth, 3) + 1)
        for path in itertools.product(range(3), repeat=depth)
    ]
    best = sorted(everything, key=value, reverse=True)[:max_nodes]
    assert len(set(tree)) == len(tree) == len(best)
    assert sum(map(value, tree)) == pytest.approx(sum(map(value, best)))
    for place, path in enumerate(tree):
        assert len(path) == 1 or path[:-1] in tree[:place]


def test_a_smaller_tree_is_the_beginning_of_a_larger_one() -> None:
    small, large = (paths(search_tree(ACCURACIES, count, 3)) for count in (6, 20))
    assert large[:6] == small


def test_ranks_need_not_fall() -> None:
    """Measured on few texts a lower rank may have been right more often."""
    tree = paths(search_tree(((0.1, 0.5),), 2, 1))
    assert tree == [(1,), (0,)]


def test_the_prior_gives_a_tree_of_the_usual_shape() -> None:
    prior = prior_accuracies(5, 10)
    assert all(0.0 < x < 1.0 for row in prior for x in row)
    depths = [len(path) for path in paths(search_tree(prior, 63, 5))]
    counts = [depths.count(depth) for depth in range(1, 6)]
    published = [10, 28, 23, 2, 0]
    assert sum(counts) == 63
    assert all(abs(own - other) <= 3 for own, other in zip(counts, published, strict=True))
