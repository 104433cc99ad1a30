"""The draft trie against a brute-force model: all paths ever added, filtered by the committed text."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.draft_tree import DraftTree
from paceline.drafts import DraftEntry
from paceline.trie import DEFAULT_CONFIDENCE, DraftTrie

VOCAB = 3
INITIAL = [0, 1]

Path = tuple[int, ...]

confidence = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 1.0])
token = st.integers(0, VOCAB - 1)


@st.composite
def entries(draw: st.DrawFn) -> DraftEntry:
    size = draw(st.integers(0, 6))
    tokens = tuple(draw(token) for _ in range(size))
    parents = tuple(draw(st.integers(-1, index - 1)) for index in range(size))
    confidences = tuple(draw(confidence) for _ in range(size)) if draw(st.booleans()) else ()
    return DraftEntry(draw(st.integers(1, 12)), tokens, parents, (), confidences)


commits = st.lists(token, min_size=1, max_size=3)
operations = st.lists(st.one_of(entries(), commits), max_size=16)


class Model:
    """Every path ever added; what is selectable is worked out from scratch each time."""

    def __init__(self, committed: list[int]) -> None:
        self.committed = list(committed)
        self.entries: list[DraftEntry] = []

    def path_acceptances(self) -> dict[Path, float]:
        """Live paths below the root and their path acceptances."""
        known: dict[Path, float] = {}
        unknown: set[Path] = set()
        length = len(self.committed)
        for entry in self.entries:
            if entry.start > length:
                continue
            text = self.committed[entry.start :]
            paths: list[Path] = []
            for index, (tok, parent) in enumerate(zip(entry.tokens, entry.parents, strict=True)):
                path = (*(paths[parent] if parent >= 0 else ()), tok)
                paths.append(path)
                if len(path) <= len(text) or list(path[: len(text)]) != text:
                    continue
                live = path[len(text) :]
                if entry.confidences:
                    known[live] = max(known.get(live, 0.0), entry.confidences[index])
                else:
                    unknown.add(live)
        path_acceptances: dict[Path, float] = {}
        for path in sorted(set(known) | unknown, key=len):
            above = path_acceptances[path[:-1]] if len(path) > 1 else 1.0
            path_acceptances[path] = above * known.get(path, DEFAULT_CONFIDENCE)
        return path_acceptances


def paths_of(tree: DraftTree) -> list[Path]:
    paths: list[Path] = []
    for tok, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), tok))
    return paths


def check_tree(
    tree: DraftTree, model: Model, max_nodes: int, max_depth: int, is_bounded: bool = False
) -> None:
    paths = paths_of(tree)
    path_acceptances = model.path_acceptances()
    assert len(paths) <= max_nodes
    assert len(set(paths)) == len(paths)
    assert all(parent < node for node, parent in enumerate(tree.parents))
    assert tree.depths == tuple(len(path) for path in paths)
    assert all(depth <= max_depth for depth in tree.depths)
    assert all(first >= second for first, second in pairwise(tree.path_acceptances))
    if is_bounded:
        assert set(paths) <= set(path_acceptances)
        return
    assert list(tree.path_acceptances) == [path_acceptances[path] for path in paths]
    best = sorted((value for path, value in path_acceptances.items() if len(path) <= max_depth), reverse=True)
    assert list(tree.path_acceptances) == best[:max_nodes]


@given(operations, st.integers(0, 12), st.integers(0, 6))
@settings(max_examples=400, deadline=None)
def test_any_history_selects_what_the_model_selects(
    history: list[DraftEntry | list[int]], max_nodes: int, max_depth: int
) -> None:
    trie, model = DraftTrie(INITIAL), Model(INITIAL)
    for operation in history:
        if isinstance(operation, DraftEntry):
            outcome = trie.add(operation)
            model.entries.append(operation)
            total = outcome.added + outcome.merged + outcome.matched + outcome.stale + outcome.ahead
            assert total == len(operation.tokens)
            assert outcome.evicted == 0
        else:
            before = set(model.path_acceptances())
            num_before, num_matched = trie.num_nodes, 0
            while tuple(operation[: num_matched + 1]) in before and num_matched < len(operation):
                num_matched += 1
            commit = trie.commit(operation)
            model.committed.extend(operation)
            assert commit.matched == num_matched
            accepted_so_far = [path for path in before if list(path[: len(operation)]) == operation]
            kept = len([path for path in accepted_so_far if len(path) > len(operation)])
            assert commit.dropped == num_before - num_matched - kept
            assert trie.num_nodes == kept + commit.attached
        assert trie.committed_length == len(model.committed)
        assert trie.num_nodes == len(model.path_acceptances())
        assert trie.max_depth == max(map(len, model.path_acceptances()), default=0)
        check_tree(trie.select_best(max_nodes, max_depth), model, max_nodes, max_depth)


@given(st.lists(entries(), max_size=6), st.lists(commits, max_size=4), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_order_delay_and_duplicates_of_messages_change_nothing(
    messages: list[DraftEntry], texts: list[list[int]], random: object
) -> None:
    """However messages interleave with the same commits, the same live paths and path acceptances remain."""
    assert hasattr(random, "shuffle")
    results = []
    for _ in range(3):
        arrivals: list[DraftEntry] = [*messages, *messages[:2]]  # two duplicates
        random.shuffle(arrivals)
        slots = sorted(random.randint(0, len(texts)) for _ in arrivals)
        trie = DraftTrie(INITIAL)
        for step in range(len(texts) + 1):
            for arrival, slot in zip(arrivals, slots, strict=True):
                if slot == step:
                    trie.add(arrival)
            if step < len(texts):
                trie.commit(texts[step])
        tree = trie.select_best(1000, 1000)
        results.append(dict(zip(paths_of(tree), tree.path_acceptances, strict=True)))
    assert results[0] == results[1] == results[2]


@given(operations, st.integers(6, 9), st.integers(1, 4))
@settings(max_examples=300, deadline=None)
def test_bounds_hold_whatever_arrives(
    history: list[DraftEntry | list[int]], max_nodes: int, window: int
) -> None:
    trie, model = DraftTrie(INITIAL, max_nodes=max_nodes, window=window), Model(INITIAL)
    for operation in history:
        if isinstance(operation, DraftEntry):
            trie.add(operation)
            model.entries.append(operation)
        else:
            trie.commit(operation)
            model.committed.extend(operation)
        assert trie.num_nodes <= max_nodes
        assert trie._early.num_tokens <= max_nodes
        tree = trie.select_best(100, 100)
        assert len(tree) == trie.num_nodes
        check_tree(tree, model, 100, 100, is_bounded=True)
