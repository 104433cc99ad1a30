"""Which part of a trie is verified where tokens were drawn: the drawn values must not decide."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from paceline.drafts import DraftEntry, DraftError, DrawRule, SiblingDraws
from paceline.trie import DraftTrie
from tests.trie.entries import COMMITTED, chain


def drawn(
    start: int,
    tokens: tuple[int, ...],
    parents: tuple[int, ...],
    rule: DrawRule = DrawRule.WITHOUT_REPLACEMENT,
) -> DraftEntry:
    """An entry whose siblings were drawn together, with confidences that must not count."""
    groups = {
        parent: SiblingDraws(
            tuple(token for token, p in zip(tokens, parents, strict=True) if p == parent), rule, None
        )
        for parent in parents
    }
    confidences = tuple((7 * token % 10) / 10 for token in tokens)
    return DraftEntry(start, tokens, parents, (), confidences, tuple(groups[parent] for parent in parents))


SIBLING_CHAIN = (-1, -1, -1, 0, 0, 3)  # three children of the root, two of the first, one of that one's first


def test_what_is_verified_of_a_drawn_tree_does_not_depend_on_the_drawn_values() -> None:
    """Two draws of one shape: at every budget the same places are taken."""
    shapes = []
    for tokens in ((1, 2, 3, 4, 5, 6), (9, 8, 1, 7, 2, 3)):
        trie = DraftTrie(COMMITTED)
        trie.add(drawn(3, tokens, SIBLING_CHAIN))
        trees = [trie.select_drawn_tree(budget, 8) for budget in range(1, 7)]
        assert len(trees[-1]) == 6
        shapes.append([(tree.parents, tree.depths, tree.path_acceptances) for tree in trees])
        for tree in trees:
            names = [tokens.index(token) for token in tree.tokens]
            kept = {parent: [n for n in names if SIBLING_CHAIN[n] == parent] for parent in set(SIBLING_CHAIN)}
            for parent, members in kept.items():  # always the first draws, in order
                assert members == [n for n in range(6) if SIBLING_CHAIN[n] == parent][: len(members)]
    assert shapes[0] == shapes[1]


def test_only_the_confidence_stated_before_a_draw_counts() -> None:
    top, low = (
        SiblingDraws(tokens, DrawRule.WITHOUT_REPLACEMENT, None, sure)
        for tokens, sure in (((4, 5), 0.9), ((6,), 0.2))
    )
    entry = DraftEntry(3, (4, 5, 6), (-1, -1, 0), (-0.1, -0.2, -0.3), draft_dists=(top, top, low))
    trie = DraftTrie(COMMITTED)
    trie.add(entry)
    trie.add(chain(3, [4, 6], 0.01))
    trie.add(chain(3, [5], 0.99))
    tree = trie.select_drawn_tree(8, 8)
    assert tree.tokens == (4, 5, 6)
    assert tree.path_acceptances == pytest.approx((0.9, 0.45, 0.18))
    assert [claim and (round(math.exp(claim.log_prob), 6), claim.position) for claim in tree.claims] == [
        (0.9, 0),
        None,  # only looked at once the first is refused
        (0.2, 1),
    ]
    assert trie.select_drawn_chain(8).path_acceptances == (0.5, 0.25)  # block verification goes by none
    calibrated = DraftTrie(COMMITTED)
    calibrated.add(replace(entry, confidences=(0.6, 0.6, 0.3)))
    assert calibrated.select_drawn_tree(8, 8).path_acceptances == pytest.approx((0.6, 0.3, 0.18))


@pytest.mark.parametrize("sure", [-0.1, 1.1, math.nan])
def test_a_confidence_that_is_no_probability_is_refused(sure: float) -> None:
    draws = SiblingDraws((4,), DrawRule.WITHOUT_REPLACEMENT, None, sure)
    with pytest.raises(DraftError, match=r"draft_dists\[0\]\.confidence"):
        DraftTrie(COMMITTED).add(DraftEntry.chain(3, (4,), draft_dists=(draws,)))


def test_a_repeated_draw_keeps_its_place() -> None:
    trie = DraftTrie(COMMITTED)
    trie.add(drawn(3, (4, 4, 5, 6), (-1, -1, -1, 0), DrawRule.WITH_REPLACEMENT))
    assert trie.num_nodes == 3
    whole = trie.select_drawn_tree(8, 8)
    assert (whole.tokens, whole.parents) == ((4, 4, 6, 5), (-1, -1, 0, -1))
    assert trie.select_drawn_tree(2, 8).tokens == (4, 4)


def test_the_entry_that_came_first_is_verified() -> None:
    trie = DraftTrie(COMMITTED)
    first, second = drawn(3, (1, 2), (-1, 0)), drawn(3, (4, 1, 5), (-1, -1, 0))
    trie.add(first)
    trie.add(second)
    trie.add(chain(3, [8], 0.99))
    for tree in (trie.select_drawn_chain(8), trie.select_drawn_tree(8, 8)):
        assert (tree.tokens, tree.parents, tree.depths) == ((1, 2), (-1, 0), (1, 2))
        assert tree.draft_dists == first.draft_dists
    assert trie.select_drawn_chain(1).tokens == (1,)


def test_tokens_that_were_not_drawn_are_ranked_where_they_came_first() -> None:
    trie = DraftTrie(COMMITTED)
    trie.add(DraftEntry(3, (1, 2), (-1, -1), (), (0.2, 0.7)))
    trie.add(drawn(3, (4, 1), (-1, -1)))
    tree = trie.select_drawn_tree(8, 8)
    assert (tree.tokens, tree.draft_dists) == ((2, 1), (None, None))


def test_a_chain_follows_first_draws_alone() -> None:
    trie = DraftTrie(COMMITTED)
    trie.add(drawn(3, (1, 2, 3, 4), (-1, -1, 1, 0)))
    assert trie.select_drawn_chain(8).tokens == (1, 4)
    trie.commit([2])
    assert trie.select_drawn_chain(8).tokens == (3,)
