"""Node budgets against brute force, and why draws are verified with an early stop."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.draft_tree import DraftTree
from paceline.drafts import DraftEntry
from paceline.scheduling import StepCurve, StepTable, allocate_nodes
from paceline.trie import DraftTrie

steps = st.lists(st.floats(0.01, 1), min_size=24, max_size=24).map(
    lambda gaps: list(itertools.accumulate(gaps))
)


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 5) -> DraftTree:
    """A random tree in the order in which the trie gives it."""
    parents = [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(0, max_nodes)))]
    confidences = draw(st.lists(st.floats(0, 1), min_size=len(parents), max_size=len(parents)))
    trie = DraftTrie([1])
    tokens = tuple(range(2, 2 + len(parents)))
    trie.add(DraftEntry(1, tokens, tuple(parents), (), tuple(confidences)))
    return trie.select_best(max_nodes, max_nodes)


def closed_subsets(tree: DraftTree) -> Iterator[tuple[int, ...]]:
    """Every set of nodes that contains the parent of each of its nodes."""
    for size in range(len(tree) + 1):
        for nodes in itertools.combinations(range(len(tree)), size):
            if all(tree.parents[node] < 0 or tree.parents[node] in nodes for node in nodes):
                yield nodes


@given(
    st.lists(trees(), min_size=1, max_size=3),
    steps,
    st.integers(0, 4),
    st.floats(0, 2),
    st.none() | st.integers(0, 8),
)
@settings(max_examples=150, deadline=None)
def test_the_full_search_is_the_best_closed_subset(
    step: list[DraftTree], times: list[float], other_rows: int, overhead_s: float, limit: int | None
) -> None:
    path_acceptances = [tree.path_acceptances for tree in step]
    counts = allocate_nodes(
        path_acceptances, times.__getitem__, other_rows=other_rows, overhead_s=overhead_s, max_nodes=limit
    )

    def rate(chosen: Sequence[Sequence[int]]) -> float:
        tokens = sum(
            1 + sum(tree.path_acceptances[i] for i in nodes) for tree, nodes in zip(step, chosen, strict=True)
        )
        rows = other_rows + len(step) + sum(map(len, chosen))
        return float(tokens / (overhead_s + times[rows]))

    best = max(
        rate(chosen)
        for chosen in itertools.product(*map(closed_subsets, step))
        if limit is None or sum(map(len, chosen)) <= limit
    )
    heads = [range(count) for count in counts]
    assert rate(heads) == pytest.approx(best, rel=1e-9)
    for tree, head in zip(step, heads, strict=True):
        assert tuple(head) in set(closed_subsets(tree))


def early_stop(
    path_acceptances: Sequence[Sequence[float]], step_time: Callable[[int], float]
) -> tuple[int, ...]:
    """DSpark's Algorithm 1 as it is written, one node after another."""
    ranked = sorted(
        (
            (-value, which, index)
            for which, values in enumerate(path_acceptances)
            for index, value in enumerate(values)
        )
    )
    rows = tokens = float(len(path_acceptances))
    best = tokens / step_time(int(rows))
    counts = [0] * len(path_acceptances)
    for negative_value, which, _ in ranked:
        tokens, rows = tokens - negative_value, rows + 1
        if not tokens / step_time(int(rows)) > best:
            break
        best = tokens / step_time(int(rows))
        counts[which] += 1
    return tuple(counts)


@given(st.lists(trees(), min_size=1, max_size=3), steps)
@settings(max_examples=150, deadline=None)
def test_with_draws_the_scan_is_algorithm_1(step: list[DraftTree], times: list[float]) -> None:
    path_acceptances = [tree.path_acceptances for tree in step]
    counts = allocate_nodes(path_acceptances, times.__getitem__, is_rejection=True)
    assert counts == early_stop(path_acceptances, times.__getitem__)
    full = allocate_nodes(path_acceptances, times.__getitem__)
    assert sum(counts) <= sum(full) or sum(full) == 0


@given(st.lists(trees(), min_size=1, max_size=3), steps, st.data())
@settings(max_examples=150, deadline=None)
def test_with_draws_a_node_depends_on_larger_path_acceptances_alone(
    step: list[DraftTree], times: list[float], data: st.DataObject
) -> None:
    """What stands below a node may change as it likes: whether the node itself is verified stays the same."""
    path_acceptances = [list(tree.path_acceptances) for tree in step]
    which = data.draw(st.integers(0, len(step) - 1))
    node = data.draw(st.integers(0, len(path_acceptances[which])))
    changed = [*map(list, path_acceptances)]
    kept = changed[which][:node]
    ceiling = kept[-1] if kept else 1.0
    changed[which] = kept + sorted(
        data.draw(st.lists(st.floats(0, ceiling, exclude_max=ceiling > 0), max_size=3)), reverse=True
    )
    before, after = (
        allocate_nodes(values, times.__getitem__, is_rejection=True)[which]
        for values in (path_acceptances, changed)
    )
    # The first `node` nodes are decided before anything that was changed is looked at.
    assert min(before, node) == min(after, node)


Law = dict[tuple[int, ...], Fraction]
Rows = dict[tuple[int, ...], tuple[Fraction, Fraction]]
"""Next-token probabilities of two tokens after each text."""


def committed_law(target: Rows, draft: Rows, choose: Callable[[list[float]], int], num_tokens: int) -> Law:
    """Exact law of the next tokens when a chain of draws is cut to `choose(path_acceptances)` and verified by
    rejection.

    The drafter's confidence in a token is the chance that such a draw is accepted, given the draws above it: what a
    perfect confidence head says. After the first rejection, or the draft, the target goes on alone.
    """
    law: Law = defaultdict(Fraction)

    def alone(text: tuple[int, ...], prob: Fraction) -> None:
        if len(text) == num_tokens:
            law[text] += prob
            return
        for token, chance in enumerate(target[text]):
            if chance:
                alone((*text, token), prob * chance)

    for draws in itertools.product((0, 1), repeat=num_tokens - 1):
        prob, path_acceptance, path_acceptances = Fraction(1), Fraction(1), []
        for depth, token in enumerate(draws):
            rows = draft[draws[:depth]], target[draws[:depth]]
            path_acceptance *= sum(map(min, *rows), start=Fraction(0))
            path_acceptances.append(float(path_acceptance))
            prob *= rows[0][token]
        text: tuple[int, ...] = ()
        for token in draws[: choose(path_acceptances)]:
            if not prob:
                break
            q, p = draft[text], target[text]
            accepted = min(Fraction(1), p[token] / q[token])
            if accepted < 1:
                left = [max(Fraction(0), a - b) for a, b in zip(p, q, strict=True)]
                for other, weight in enumerate(left):
                    if weight:
                        alone((*text, other), prob * (1 - accepted) * weight / sum(left))
            prob *= accepted
            text = (*text, token)
        if prob:
            alone(text, prob)
    return dict(law)


def target_law(target: Rows, num_tokens: int) -> Law:
    law: Law = {}
    for text in itertools.product((0, 1), repeat=num_tokens):
        prob = Fraction(1)
        for depth, token in enumerate(text):
            prob *= target[text[:depth]][token]
        if prob:
            law[text] = prob
    return law


def pair(percent: int) -> tuple[Fraction, Fraction]:
    return Fraction(percent, 100), Fraction(100 - percent, 100)


def test_the_papers_counterexample_biases_a_full_search_and_not_the_early_stop() -> None:
    """DSpark, arXiv 2607.05147: the first draw decides the second's confidence, which would pull the first one in."""
    target: Rows = {(): pair(70), (0,): pair(90), (1,): pair(99), (0, 0): pair(50), (0, 1): pair(50)}
    target |= {(1, 0): pair(50), (1, 1): pair(50)}
    draft: Rows = {(): pair(50), (0,): pair(89), (1,): pair(1)}
    speeds = {1: 1.0, 2: 0.5, 3: 0.45}

    def choose(path_acceptances: list[float], is_rejection: bool) -> int:
        return allocate_nodes([path_acceptances], lambda rows: 1 / speeds[rows], is_rejection=is_rejection)[0]

    def first_token(law: Law) -> tuple[Fraction, Fraction]:
        sums = [
            sum((prob for text, prob in law.items() if text[0] == token), Fraction(0)) for token in (0, 1)
        ]
        return sums[0], sums[1]

    searched = committed_law(target, draft, lambda s: choose(s, False), 3)
    stopped = committed_law(target, draft, lambda s: choose(s, True), 3)
    assert first_token(searched) == pair(85)  # the paper's figure; the target's is 0.7
    assert first_token(stopped) == pair(70)
    assert stopped == target_law(target, 3)


def test_the_early_stop_is_exact_and_the_full_search_is_not_on_random_pairs() -> None:
    random_source = random.Random(11)
    num_biased = num_drafted = 0
    for _ in range(300):
        texts = [text for length in range(3) for text in itertools.product((0, 1), repeat=length)]
        target = {text: pair(random_source.randrange(1, 100)) for text in texts}
        draft = {text: pair(random_source.randrange(1, 100)) for text in texts}
        times = list(itertools.accumulate(random_source.uniform(0.0, 0.8) + 0.1 for _ in range(8)))
        elsewhere = sorted((random_source.random() for _ in range(2)), reverse=True)  # another sequence

        def choose(
            path_acceptances: list[float],
            is_rejection: bool,
            times: list[float] = times,
            elsewhere: list[float] = elsewhere,
        ) -> int:
            nonlocal num_drafted
            count = allocate_nodes(
                [path_acceptances, elsewhere], times.__getitem__, is_rejection=is_rejection
            )[0]
            num_drafted += count * is_rejection
            return count

        expected = target_law(target, 3)
        assert committed_law(target, draft, lambda s, choose=choose: choose(s, True), 3) == expected
        num_biased += committed_law(target, draft, lambda s, choose=choose: choose(s, False), 3) != expected
    assert num_biased > 3
    assert num_drafted > 100


def test_path_acceptances_can_be_scaled() -> None:
    """Confidences that promise too much are worth less; the sequence's own token is not."""

    def flat_then_steep(rows: int) -> float:
        return 1.0 + 0.3 * (rows - 1)

    assert allocate_nodes([[0.6, 0.5]], flat_then_steep) == (2,)
    assert allocate_nodes([[0.6, 0.5]], flat_then_steep, scale=0.3) == (0,)


def test_overhead_and_other_rows_make_nodes_cheaper() -> None:
    def steep(rows: int) -> float:
        return 0.5 * rows

    assert allocate_nodes([[0.6, 0.5]], steep) == (0,)
    assert allocate_nodes([[0.6, 0.5]], steep, overhead_s=1.0) == (2,)
    assert allocate_nodes([[0.6, 0.5]], steep, other_rows=3) == (2,)


def test_a_table_gives_what_the_curve_gives() -> None:
    curve = StepCurve.fit([(1, 0.014), (2, 0.0141), (8, 0.015), (60, 0.02), (400, 0.09)])
    table = StepTable(curve, 1200)
    assert table.max_rows == 1200
    for rows in (1, 2, 3, 8, 31, 33, 60, 61, 100, 399, 400, 401, 777, 1200):
        assert table(rows) == pytest.approx(curve(rows), rel=1e-9), rows
    path_acceptances = [[0.9, 0.8, 0.4], [0.7, 0.1]]
    for is_rejection in (False, True):
        fast = allocate_nodes(path_acceptances, table, is_rejection=is_rejection, other_rows=40)
        assert fast == allocate_nodes(path_acceptances, curve, is_rejection=is_rejection, other_rows=40)
    with pytest.raises(ValueError):
        table(1201)
    with pytest.raises(ValueError):
        StepTable(lambda rows: -1.0, 4)


def test_nobody_and_nothing() -> None:
    assert allocate_nodes([], float) == ()
    assert allocate_nodes([[], []], float) == (0, 0)
    assert allocate_nodes([[0.9]], float, max_nodes=0) == (0,)
