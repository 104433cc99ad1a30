"""The draft trie case by case: what each kind of entry and commit does."""

from __future__ import annotations

import math
import time

import pytest

from paceline.drafts import DraftEntry, DraftError
from paceline.trie import DEFAULT_CONFIDENCE, AddResult, CommitResult, DraftTrie
from tests.trie.entries import COMMITTED, chain


def test_an_empty_trie_selects_nothing() -> None:
    trie = DraftTrie(COMMITTED)
    assert len(trie.select_best(8, 8)) == 0
    assert (trie.committed_length, trie.num_nodes, trie.max_depth) == (3, 0, 0)


def test_a_chain_comes_back_as_it_was_sent() -> None:
    trie = DraftTrie(COMMITTED)
    assert trie.add(chain(3, [1, 2, 3])) == AddResult(added=3)
    tree = trie.select_best(8, 8)
    assert tree.tokens == (1, 2, 3)
    assert tree.parents == (-1, 0, 1)
    assert tree.depths == (1, 2, 3)
    assert tree.path_acceptances == (0.5, 0.25, 0.125)
    assert trie.max_depth == 3


def test_budgets_cut_the_least_likely_nodes() -> None:
    trie = DraftTrie(COMMITTED)
    trie.add(DraftEntry(3, (1, 2, 3, 4), (-1, -1, 0, 1), (), (0.6, 0.3, 0.4, 0.9)))
    assert trie.select_best(3, 8).tokens == (1, 2, 4)  # path acceptances 0.6, 0.3, 0.27 before 0.24
    assert trie.select_best(8, 1).tokens == (1, 2)
    assert trie.select_best(0, 8).tokens == trie.select_best(8, 0).tokens == ()
    assert trie.select_best(8, 8).head(2) == trie.select_best(2, 8)


def test_a_late_draft_skips_what_was_committed_meanwhile() -> None:
    trie = DraftTrie(COMMITTED)
    trie.commit([1, 2])
    assert trie.add(chain(3, [1, 2, 3, 4])) == AddResult(added=2, matched=2)
    assert trie.select_best(8, 8).tokens == (3, 4)


def test_a_late_draft_that_contradicts_the_text_is_stale_from_there_on() -> None:
    trie = DraftTrie(COMMITTED)
    trie.commit([1, 2])
    assert trie.add(chain(3, [1, 5, 3, 4])) == AddResult(matched=1, stale=3)
    assert trie.num_nodes == 0


def test_a_draft_from_before_the_window_is_stale() -> None:
    trie = DraftTrie(list(range(10)), window=4)
    assert trie.add(chain(5, [5, 6, 7, 8, 9, 1])) == AddResult(stale=6)
    assert trie.add(chain(6, [6, 7, 8, 9, 1])) == AddResult(matched=4, added=1)
    trie.commit([1] * 20)
    assert trie.add(chain(25, [1])) == AddResult(stale=1)
    assert trie.add(chain(26, [1, 1, 1, 1, 3])) == AddResult(matched=4, added=1)


def test_an_entry_from_ahead_waits_for_its_start() -> None:
    trie = DraftTrie(COMMITTED)
    assert trie.add(chain(5, [3, 4])) == AddResult(ahead=2)
    assert (trie.num_nodes, trie._early.num_tokens) == (0, 2)
    assert trie.add(chain(5, [3, 4])) == AddResult(ahead=2)
    assert trie._early.num_tokens == 2  # the duplicate took no room
    assert trie.commit([1]) == CommitResult(matched=0, dropped=0, attached=0)
    assert trie.commit([2, 3]) == CommitResult(matched=0, dropped=0, attached=1)
    assert trie.select_best(8, 8).tokens == (4,)
    assert trie._early.num_tokens == 0


def test_an_entry_from_too_far_ahead_is_stale() -> None:
    trie = DraftTrie(COMMITTED, window=8)
    assert trie.add(chain(10**12, [1])) == AddResult(stale=1)
    assert trie._early.num_tokens == 0


def test_early_entries_are_bounded_and_the_furthest_leave() -> None:
    trie = DraftTrie(COMMITTED, max_nodes=4)
    trie.add(chain(6, [1, 2]))
    trie.add(chain(5, [1, 2]))
    assert trie.add(chain(4, [1, 2])) == AddResult(ahead=2, evicted=2)
    assert trie._early.num_tokens == 4
    trie.commit([9, 9])
    assert trie.commit([9]).attached == 0  # the entry that started at 6 is gone


def test_a_commit_moves_the_root_down_and_counts_dropped_nodes() -> None:
    trie = DraftTrie(COMMITTED)
    trie.add(DraftEntry(3, (1, 2, 3, 4), (-1, -1, 0, 2), (), (0.5,) * 4))
    assert trie.commit([1]) == CommitResult(matched=1, dropped=1, attached=0)
    assert trie.select_best(8, 8).tokens == (3, 4)
    assert trie.commit([3, 6]) == CommitResult(matched=1, dropped=1, attached=0)
    assert trie.num_nodes == 0
    assert trie.commit([]) == CommitResult(matched=0, dropped=0, attached=0)
    assert trie.committed_length == 6


def test_paths_of_several_drafters_merge_and_the_larger_confidence_stays() -> None:
    trie = DraftTrie(COMMITTED)
    trie.add(chain(3, [1, 2], 0.5))
    assert trie.add(DraftEntry(3, (1, 3), (-1, 0), (), (0.8, 0.1))) == AddResult(added=1, merged=1)
    trie.add(chain(3, [1], 0.2))
    assert trie.select_best(8, 8).path_acceptances == (0.8, 0.8 * 0.5, 0.8 * 0.1)


def test_a_known_confidence_replaces_an_unknown_one_even_when_lower() -> None:
    trie = DraftTrie(COMMITTED)
    trie.add(DraftEntry.chain(3, [1]))
    assert trie.select_best(1, 1).path_acceptances == (DEFAULT_CONFIDENCE,)
    trie.add(chain(3, [1], 0.1))
    trie.add(DraftEntry.chain(3, [1]))
    assert trie.select_best(1, 1).path_acceptances == (0.1,)


def test_log_probs_replace_missing_confidences() -> None:
    trie = DraftTrie(COMMITTED)
    trie.add(DraftEntry.chain(3, [1, 2], log_probs=[math.log(0.25), -math.inf]))
    assert trie.select_best(2, 2).path_acceptances == (pytest.approx(0.25), 0.0)


def test_the_lowest_path_acceptances_are_evicted() -> None:
    trie = DraftTrie(COMMITTED, max_nodes=4)
    trie.add(DraftEntry(3, (1, 2, 3, 4), (-1, -1, -1, 0), (), (0.9, 0.2, 0.1, 0.9)))
    assert trie.add(chain(3, [5], 0.5)) == AddResult(added=1, evicted=1)
    assert set(trie.select_best(8, 8).tokens) == {1, 4, 5, 2}
    assert trie.num_nodes == 4


def test_cleared_is_empty() -> None:
    trie = DraftTrie(COMMITTED)
    trie.add(chain(3, [1, 2], 0.5))
    trie.add(chain(5, [1, 2], 0.5))
    assert trie.clear() == 2
    assert (trie.num_nodes, trie._early.num_tokens) == (0, 0)
    assert trie.commit([1, 2]).attached == 0


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (DraftEntry(0, (1,), (-1,)), "start"),
        (DraftEntry(3, (1, 2), (-1,)), "parents"),
        (DraftEntry(3, (1, 2), (-1, 1)), r"parents\[1\]"),
        (DraftEntry(3, (1, 2), (0, 0)), r"parents\[0\]"),
        (DraftEntry(3, (1, 2), (-1, -2)), r"parents\[1\]"),
        (DraftEntry(3, (1, 2), (-1, 0), (-1.0,)), "log_probs"),
        (DraftEntry(3, (1, 2), (-1, 0), (-1.0, math.nan)), r"log_probs\[1\]"),
        (DraftEntry(3, (1,), (-1,), (0.5,)), r"log_probs\[0\]"),
        (DraftEntry(3, (1,), (-1,), (math.inf,)), r"log_probs\[0\]"),
        (DraftEntry(3, (1, 2), (-1, 0), (), (0.5,)), "confidences"),
        (DraftEntry(3, (1,), (-1,), (), (math.nan,)), r"confidences\[0\]"),
        (DraftEntry(3, (1,), (-1,), (), (1.5,)), r"confidences\[0\]"),
        (DraftEntry(3, (1,), (-1,), (), (-0.5,)), r"confidences\[0\]"),
        (DraftEntry(3, (-1,), (-1,)), r"tokens\[0\]"),
        (DraftEntry(3, (10,), (-1,)), "vocabulary"),
        (DraftEntry(3, (True,), (-1,)), r"tokens\[0\]"),
        (DraftEntry(3, (1,) * 9, tuple(range(-1, 8))), "at most 8"),
        (DraftEntry(3, (1,), (-1,), draft_dists=()), "draft_dists"),
    ],
)
def test_malformed_entries_are_refused_whole(entry: DraftEntry, message: str) -> None:
    trie = DraftTrie(COMMITTED, vocab_size=10, max_nodes=8)
    with pytest.raises(DraftError, match=message):
        trie.add(entry)
    assert trie.num_nodes == 0


def test_the_constructor_checks_its_arguments() -> None:
    with pytest.raises(ValueError, match="root"):
        DraftTrie([])
    with pytest.raises(ValueError, match="max_nodes"):
        DraftTrie([1], max_nodes=0)


def test_a_round_costs_little() -> None:
    """Add, select and commit of a chain of 8 is far below a step; the bound is loose for busy machines."""
    trie = DraftTrie(COMMITTED)
    best_s = math.inf
    for _ in range(200):
        entry = chain(trie.committed_length, list(range(8)), 0.9)
        started_s = time.perf_counter()
        trie.add(entry)
        tree = trie.select_best(8, 8)
        trie.commit([*tree.tokens[:3], 77])
        best_s = min(best_s, time.perf_counter() - started_s)
    assert best_s < 200e-6


def test_a_part_of_a_tree_keeps_its_shape() -> None:
    trie = DraftTrie([1])
    trie.add(DraftEntry(1, (2, 3, 4, 5), (-1, 0, 0, 2), confidences=(0.9, 0.8, 0.7, 0.6)))
    tree = trie.select_best(4, 4)
    assert tree.tokens == (2, 3, 4, 5)
    part = tree.only([0, 2, 3])
    assert (part.tokens, part.parents, part.depths) == ((2, 4, 5), (-1, 0, 1), (1, 2, 3))
    assert part.path_acceptances == (
        tree.path_acceptances[0],
        tree.path_acceptances[2],
        tree.path_acceptances[3],
    )
    assert tree.only([0, 1, 2, 3]) is tree
    assert len(tree.only([])) == 0
