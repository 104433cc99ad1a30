"""Rules give each row of a tree the bits that plain decoding of its path gives, and mean what vLLM means by them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.draft_tree import EMPTY_TREE, DraftTree
from paceline.sampling.bad_runs import BadRuns
from paceline.sampling.bias import LogitBias
from paceline.sampling.min_tokens import MinTokens
from paceline.sampling.penalties import Penalties
from paceline.sampling.rules import LogitRule

VOCAB = 13
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)
Make = Callable[[Sequence[int], Sequence[int]], list[LogitRule]]


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    parents: list[int] = []
    depths: list[int] = []
    for node in range(draw(st.integers(0, 10))):
        parent = draw(st.integers(-1, node - 1))
        parents.append(parent)
        depths.append(1 if parent < 0 else depths[parent] + 1)
    # Few different tokens, so that paths repeat one another and the committed text.
    ids = tuple(draw(st.integers(0, 4)) for _ in parents)
    return DraftTree(ids, tuple(parents), tuple(depths), (1.0,) * len(ids), (None,) * len(ids))


@st.composite
def rule_sets(draw: st.DrawFn) -> Make:
    """A function that makes the rules for a prompt and a completion that is there already."""
    runs = draw(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=4))
    biases = tuple(draw(st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32))).items())
    min_tokens = draw(st.integers(0, 9))
    stops = draw(st.sets(st.integers(0, VOCAB - 1), max_size=3))
    penalties = {
        "repetition": draw(st.sampled_from([1.0, 0.7, 1.3, 10.0])),
        "presence": draw(st.sampled_from([0.0, 0.3, -2.0, 1.1])),
        "frequency": draw(st.sampled_from([0.0, 0.7, -0.1, 2.0])),
    }

    def make(prompt: Sequence[int], completion: Sequence[int]) -> list[LogitRule]:
        return [
            BadRuns(runs, completion),
            MinTokens(min_tokens, stops, len(completion)),
            LogitBias(biases),
            Penalties(VOCAB, prompt, completion, **penalties),
        ]

    return make


def path_to(tree: DraftTree, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(tree.tokens[node])
        node = tree.parents[node]
    return path[::-1]


def bits(row: torch.Tensor) -> list[int]:
    return row.view(torch.int32).tolist()


@settings(max_examples=200, deadline=None)
@given(rule_sets(), tokens, tokens, st.integers(0, 12), trees(), st.integers(0, 2**31))
def test_every_row_has_the_bits_of_plain_decoding(
    make: Make, prompt: list[int], completion: list[int], num_resumed: int, tree: DraftTree, seed: int
) -> None:
    logits = torch.randn((1 + len(tree), VOCAB), generator=torch.Generator().manual_seed(seed)) * 5
    # The first tokens of the completion were generated before a move, the others committed here, three at a time.
    rules = make(prompt, completion[:num_resumed])
    for begin in range(num_resumed, len(completion), 3):
        for rule in rules:
            rule.commit(completion[begin : begin + 3])
    changed = logits.clone()
    for rule in rules:
        rule.apply(changed, tree)
    for row in range(1 + len(tree)):
        plain = make(prompt, [])
        for token in [*completion, *path_to(tree, row - 1)]:
            for rule in plain:
                rule.apply(torch.zeros(1, VOCAB), EMPTY_TREE)
                rule.commit([token])
        alone = logits[row : row + 1].clone()
        for rule in plain:
            rule.apply(alone, EMPTY_TREE)
        assert bits(changed[row]) == bits(alone[0])


@settings(deadline=None)
@given(
    tokens,
    tokens,
    trees(),
    st.floats(0.1, 10),
    st.floats(-2, 2),
    st.floats(-2, 2),
)
def test_penalties_against_their_definition(
    prompt: list[int],
    completion: list[int],
    tree: DraftTree,
    repetition: float,
    presence: float,
    frequency: float,
) -> None:
    logits = torch.linspace(-3, 3, VOCAB).repeat(1 + len(tree), 1)
    changed = logits.clone()
    Penalties(VOCAB, prompt, completion, repetition=repetition, presence=presence, frequency=frequency).apply(
        changed, tree
    )
    for row in range(1 + len(tree)):
        text = [*completion, *path_to(tree, row - 1)]
        for token in range(VOCAB):
            value = float(logits[row, token])
            if token in prompt or token in text:
                value = value / repetition if value > 0 else value * repetition
            value -= frequency * text.count(token) + presence * (token in text)
            assert float(changed[row, token]) == pytest.approx(value, abs=1e-4)


@settings(deadline=None)
@given(
    tokens,
    trees(),
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=5),
)
def test_bad_runs_against_their_definition(
    completion: list[int], tree: DraftTree, runs: list[list[int]]
) -> None:
    logits = torch.zeros(1 + len(tree), VOCAB)
    BadRuns(runs, completion).apply(logits, tree)
    for row in range(1 + len(tree)):
        text = [*completion, *path_to(tree, row - 1)]
        masked = {run[-1] for run in runs if [*text, run[-1]][-len(run) :] == run}
        assert {token for token in range(VOCAB) if logits[row, token] == -math.inf} == masked


def test_a_bad_run_over_the_border_between_committed_and_drafted_text() -> None:
    rule = BadRuns([[1, 2, 3]])
    rule.commit([7, 1])
    chain = DraftTree((2, 5), (-1, 0), (1, 2), (1.0, 1.0), (None, None))
    logits = torch.zeros(3, VOCAB)
    rule.apply(logits, chain)
    assert logits.isinf().nonzero().tolist() == [[1, 3]]


def test_stop_tokens_wait_for_the_smallest_length_at_each_depth() -> None:
    rule = MinTokens(5, {4, 2}, num_tokens=2)
    rule.commit([8])
    chain = DraftTree((1, 1, 1), (-1, 0, 1), (1, 2, 3), (1.0,) * 3, (None,) * 3)
    logits = torch.zeros(4, VOCAB)
    rule.apply(logits, chain)
    assert logits.isinf().nonzero().tolist() == [[0, 2], [0, 4], [1, 2], [1, 4]]
    rule.commit([1, 1])
    logits = torch.zeros(1, VOCAB)
    rule.apply(logits, EMPTY_TREE)
    assert not logits.isinf().any()


def test_a_penalty_does_not_unmask() -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    Penalties(VOCAB, [1], [1], repetition=0.5, presence=-2.0, frequency=-2.0).apply(logits, EMPTY_TREE)
    assert logits.isinf().all()


def test_bits_do_not_depend_on_how_many_tokens_are_punished_together() -> None:
    vocab, generator = 2003, torch.Generator().manual_seed(3)
    text = torch.randint(vocab, (900,), generator=generator).tolist()
    logits = torch.randn((1, vocab), generator=generator)
    options = {"repetition": 1.17, "presence": 0.31, "frequency": 0.23}
    chain = DraftTree(tuple(text[600:]), tuple(range(-1, 299)), tuple(range(1, 301)), (), ())
    drafted = logits.repeat(301, 1)
    Penalties(vocab, text[:300], text[300:600], **options).apply(drafted, chain)
    committed = logits.clone()
    Penalties(vocab, text[:300], text[300:], **options).apply(committed, EMPTY_TREE)
    assert bits(drafted[-1]) == bits(committed[0])
