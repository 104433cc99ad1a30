"""Typical acceptance: the rule by hand, and that it is not exact."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
import torch

from paceline.draft_tree import DraftTree
from paceline.drafts import DraftError
from paceline.sampling.batch import verify_step
from paceline.sampling.params import SamplingParams, VerifyMode
from paceline.sampling.typical import decide_typical
from paceline.sampling.verify import FinalKind, Verdict

EPSILON, DELTA = 0.09, 0.3


def rows(*probs: list[float]) -> torch.Tensor:
    return torch.tensor(probs, dtype=torch.float64)


def tree(tokens: tuple[int, ...], parents: tuple[int, ...]) -> DraftTree:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return DraftTree(tokens, parents, tuple(depths), (1.0,) * len(tokens), (None,) * len(tokens))


FLAT = [0.25, 0.25, 0.25, 0.25]  # entropy log 4: the bound is 0.3 / 4
SHARP = [0.91, 0.0895, 0.0005, 0.0]  # entropy 0.31: 0.3 * 0.74 is above epsilon, so that epsilon binds


@pytest.mark.parametrize(
    ("row", "token", "is_kept"),
    [
        (FLAT, 2, True),
        (SHARP, 0, True),
        (SHARP, 1, False),  # just below epsilon
        ([0.909, 0.0905, 0.0005, 0.0], 1, True),  # just above
        ([0.074, 0.31, 0.308, 0.308], 0, False),  # entropy 1.28: the bound is 0.0833
        ([0.084, 0.306, 0.305, 0.305], 0, True),  # entropy 1.29: 0.0823
    ],
)
def test_a_token_is_typical_above_the_bound(row: list[float], token: int, is_kept: bool) -> None:
    verdict = decide_typical(tree((token,), (-1,)), rows(row, FLAT), EPSILON, DELTA, [0.0, 0.9])
    assert verdict.accepted_tokens == ((token,) if is_kept else ())


@pytest.mark.parametrize("gap", [-1e-9, 1e-9])
def test_the_bound_is_where_the_formula_puts_it(gap: float) -> None:
    """At entropy H the bound is delta * exp(-H): here the token's own probability meets it."""
    others = 0.0
    low, high = 0.0, 0.25
    for _ in range(200):  # the probability x with x = 0.3 exp(-H(x, (1-x)/3 thrice))
        x = (low + high) / 2
        others = (1 - x) / 3
        entropy = -(x * math.log(x) + 3 * others * math.log(others))
        low, high = (x, high) if x < DELTA * math.exp(-entropy) else (low, x)
    assert x < EPSILON
    row = [x + gap, others, others, 1 - x - gap - 2 * others]
    verdict = decide_typical(tree((0,), (-1,)), rows(row, FLAT), EPSILON, DELTA, [0.5, 0.5])
    assert bool(verdict.accepted_tokens) == (gap > 0)


def test_the_longest_path_is_kept_and_ties_go_to_the_likeliest() -> None:
    fork = tree((0, 1, 2, 3, 2), (-1, -1, 0, 1, 1))  # paths 0 2, 1 3, 1 2
    probs = rows(
        [0.5, 0.3, 0.2, 0.0],
        [0.4, 0.3, 0.3, 0.0],  # behind 0
        [0.1, 0.1, 0.2, 0.6],  # behind 1
        FLAT,
        FLAT,
        FLAT,
    )
    # 0 2: 0.5 * 0.3 = 0.15; 1 3: 0.3 * 0.6 = 0.18; 1 2: 0.06.
    verdict = decide_typical(fork, probs, EPSILON, DELTA, [0.1, 0.1, 0.3])
    assert verdict == Verdict((2, 4), (1, 3), 1, FinalKind.BONUS)
    probs[2] = torch.tensor([1.0, 0.0, 0.0, 0.0])  # neither child of 1 is typical any more
    assert decide_typical(fork, probs, EPSILON, DELTA, [0.1, 0.1, 0.3]).accepted_tokens == (0, 2)


def test_a_child_of_a_token_that_is_not_typical_is_not_kept() -> None:
    probs = rows([0.0, 1.0, 0.0, 0.0], FLAT, FLAT)
    verdict = decide_typical(tree((0, 2), (-1, 0)), probs, EPSILON, DELTA, [0.5, 0.5, 0.5])
    assert verdict == Verdict((), (), 1, FinalKind.RECOVERED)


def test_the_token_behind_the_path_is_the_targets_draw() -> None:
    verdict = decide_typical(tree((0,), (-1,)), rows(FLAT, [0.5, 0.5, 0.0, 0.0]), EPSILON, DELTA, [0.1, 0.7])
    assert verdict == Verdict((1,), (0,), 1, FinalKind.BONUS)
    assert decide_typical(DraftTree(), rows(FLAT), EPSILON, DELTA, [0.6]) == Verdict(
        (), (), 2, FinalKind.PLAIN
    )


def test_it_is_not_exact() -> None:
    """A drafted token above the bound is kept every time, however the target would have chosen."""
    draft = tree((1,), (-1,))
    logits = torch.tensor([[0.6, 0.4], [0.5, 0.5]]).log()
    counts: dict[int, int] = defaultdict(int)
    for seed in range(50):
        params = SamplingParams(seed=seed, mode=VerifyMode.TYPICAL)
        counts[verify_step(logits, [draft], [5], [params])[0].committed_tokens[0]] += 1
    assert counts == {1: 50}
    assert not VerifyMode.TYPICAL.is_exact
    assert all(mode.is_exact for mode in VerifyMode if mode is not VerifyMode.TYPICAL)


def test_the_requests_own_bounds_apply() -> None:
    draft = tree((1,), (-1,))
    logits = torch.tensor([[0.6, 0.4], [0.5, 0.5]]).log()
    params = SamplingParams(seed=0, mode=VerifyMode.TYPICAL, typical_epsilon=1.0, typical_delta=1.0)
    # exp(-H) = 0.51: the token's 0.4 is below it.
    assert verify_step(logits, [draft], [5], [params])[0].accepted_tokens == ()


def test_it_is_never_a_default() -> None:
    assert SamplingParams(temperature=0.7).resolved_mode is not VerifyMode.TYPICAL
    assert SamplingParams(temperature=0.0, mode=VerifyMode.TYPICAL).resolved_mode is VerifyMode.GREEDY


def test_shapes_and_tokens_are_checked() -> None:
    with pytest.raises(DraftError, match="vocabulary"):
        decide_typical(tree((4,), (-1,)), rows(FLAT, FLAT), EPSILON, DELTA, [0.5, 0.5])
    with pytest.raises(ValueError, match="target rows"):
        decide_typical(tree((1,), (-1,)), rows(FLAT), EPSILON, DELTA, [0.5, 0.5])
    with pytest.raises(ValueError, match="numbers"):
        decide_typical(tree((1,), (-1,)), rows(FLAT, FLAT), EPSILON, DELTA, [0.5])
