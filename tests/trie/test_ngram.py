"""N-gram proposals: compared with a search over the whole text, and merged into a drafter's tree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.draft_tree import EMPTY_TREE, DraftTree
from paceline.drafts import DraftClaim, DraftEntry
from paceline.ngram import MAX_MATCH, MIN_MATCH, MatchAcceptance, NgramProposal, TextIndex, merge_proposal
from paceline.trie import DraftTrie

texts = st.lists(st.integers(0, 2), max_size=40)


def longest_earlier_match(text: list[int]) -> tuple[int, int] | None:
    """By definition, over the eight newest places where the last MIN_MATCH tokens occurred before."""
    end = len(text)
    places = [
        place
        for place in range(end - 1, MIN_MATCH - 1, -1)
        if text[place - MIN_MATCH : place] == text[end - MIN_MATCH :]
    ]
    best = None
    for place in places[:8]:
        match = MIN_MATCH
        while match < min(MAX_MATCH, place) and text[place - match - 1] == text[end - match - 1]:
            match += 1
        if best is None or match > best[0]:
            best = match, place
    return best


@given(texts, st.lists(st.integers(1, 5), max_size=8))
def test_finds_the_longest_match_however_the_text_came(text: list[int], cuts: list[int]) -> None:
    index, rest = TextIndex(), list(text)
    for cut in cuts:
        index.extend(rest[:cut])
        rest = rest[cut:]
    index.extend(rest)
    assert index.find() == longest_earlier_match(text)


@given(texts, st.integers(1, 12))
def test_a_proposal_continues_as_the_text_did(text: list[int], count: int) -> None:
    index = TextIndex()
    index.extend(text)
    proposal = index.propose(count, MatchAcceptance())
    found = longest_earlier_match(text)
    if found is None:
        assert proposal is None
        return
    assert proposal is not None
    match, place = found
    longer = list(text)
    while len(longer) < place + count:  # one that repeats without end
        longer.append(longer[len(longer) - (len(text) - place)])
    assert proposal.match == match
    assert list(proposal.tokens) == longer[place : place + count]
    assert list(proposal.path_acceptances) == sorted(proposal.path_acceptances, reverse=True)


def test_the_newest_part_of_a_long_text_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.ngram.MAX_TEXT", 16)
    text = [*range(100), 97, 98, 99]
    whole, pieces = TextIndex(), TextIndex()
    whole.extend(text)
    for token in text:
        pieces.extend([token])
    for index in (whole, pieces):
        assert len(index._text) <= 16
        proposal = index.propose(2, MatchAcceptance())
        assert proposal is not None
        assert proposal.tokens == (97, 98)
    pieces.extend(range(200, 220))  # all of it is gone by now
    pieces.extend([97, 98, 99])
    assert pieces.find() is None


def test_no_text_repeats_in_its_first_tokens() -> None:
    index = TextIndex()
    for token in (1, 1, 1):
        index.extend([token])
        assert index.propose(4, MatchAcceptance()) is None
    index.extend([1])
    proposal = index.propose(4, MatchAcceptance())
    assert proposal is not None
    assert proposal.tokens == (1, 1, 1, 1)
    assert index.propose(0, MatchAcceptance()) is None


def test_acceptance_is_learned_from_committed_tokens() -> None:
    acceptance = MatchAcceptance()
    before = acceptance.next(3), acceptance.next(6)
    assert before[0] < before[1]
    for _ in range(400):
        acceptance.observe(
            NgramProposal(3, (7, 8, 9), (0.5, 0.4, 0.3)), [7, 1]
        )  # the first comes, the second does not
    assert acceptance.next(3) > 0.9
    assert acceptance.next(4) < 0.1
    assert acceptance.next(6) == before[1]  # nothing past the first miss is told
    assert acceptance.next(500) == acceptance.next(MAX_MATCH)


@st.composite
def drafted_trees(draw: st.DrawFn) -> DraftTree:
    """A tree as a trie hands it out."""
    trie = DraftTrie([1])
    for _ in range(draw(st.integers(0, 3))):
        tokens = draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
        log_probs = [-draw(st.floats(0.01, 3.0)) for _ in tokens]
        trie.add(DraftEntry.chain(1, tokens, log_probs))
    return trie.select_best(draw(st.integers(0, 8)), 6)


@given(
    drafted_trees(),
    st.lists(st.integers(0, 2), min_size=1, max_size=6),
    st.lists(st.floats(0.05, 1.0), min_size=6, max_size=6),
    st.integers(1, 14),
    st.integers(1, 6),
)
def test_a_merged_tree_holds_both_proposals(
    tree: DraftTree, tokens: list[int], acceptance: list[float], max_nodes: int, max_depth: int
) -> None:
    path_acceptances = []
    for share in acceptance[: len(tokens)]:
        path_acceptances.append(share * (path_acceptances[-1] if path_acceptances else 1.0))
    both = merge_proposal(
        tree, NgramProposal(3, tuple(tokens), tuple(path_acceptances)), max_nodes, max_depth
    )

    paths: dict[tuple[int, ...], int] = {}
    for node, (token, parent) in enumerate(zip(both.tokens, both.parents, strict=True)):
        assert parent < node
        above = next((path for path, at in paths.items() if at == parent), ())
        assert both.depths[node] == len(above) + 1
        paths[(*above, token)] = node
    assert len(paths) == len(both)
    assert list(both.path_acceptances) == sorted(both.path_acceptances, reverse=True)

    own: dict[tuple[int, ...], float] = {}
    drafted: dict[tuple[int, ...], int] = {}
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        above = next((path for path, at in drafted.items() if at == parent), ())
        drafted[(*above, token)] = node
        own[(*above, token)] = tree.path_acceptances[node]
    ngram = {
        tuple(tokens[: depth + 1]): path_acceptance
        for depth, path_acceptance in enumerate(path_acceptances)
        if depth < max_depth
    }
    whole = {path: max(own.get(path, 0.0), ngram.get(path, 0.0)) for path in {*own, *ngram}}
    assert len(both) == min(max_nodes, len(whole))
    for path, node in paths.items():
        assert both.path_acceptances[node] == whole[path]
        assert both.drafter_path_acceptances[node] == own.get(path, 0.0)
        assert both.is_drafted(node) == (path in own)
        assert both.claims[node] == (tree.claims[drafted[path]] if path in own else None)
    assert both.num_ngram_nodes == sum(path not in own for path in paths)
    left_out = [path_acceptance for path, path_acceptance in whole.items() if path not in paths]
    assert not left_out or max(left_out) <= min(both.path_acceptances)
    for count in range(len(both) + 1):
        head = both.head(count)
        assert head.drafter_path_acceptances == both.drafter_path_acceptances[:count]
        assert head.drafted_depth == max(
            (len(path) for path, node in paths.items() if path in own and node < count), default=0
        )


def test_a_tree_without_ngram_nodes_is_all_the_drafters() -> None:
    tree = DraftTree((5,), (-1,), (1,), (0.5,), (None,), (DraftClaim(-0.7, 0),))
    assert tree.is_drafted(0)
    assert (tree.drafted_depth, tree.num_ngram_nodes) == (1, 0)
    assert EMPTY_TREE.drafted_depth == 0
    both = merge_proposal(EMPTY_TREE, NgramProposal(3, (5, 6), (0.5, 0.4)), 8, 8)
    assert both.drafted_depth == 0
    assert both.only([0]).drafter_path_acceptances == (0.0,)


@pytest.mark.parametrize("text", [[1, 2, 3], [1, 2, 3, 1, 2], []])
def test_short_texts_have_no_proposal(text: list[int]) -> None:
    index = TextIndex()
    index.extend(text)
    assert index.find() is None
