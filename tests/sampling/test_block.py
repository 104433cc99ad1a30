"""Block verification: its law and its acceptance, by enumerating every draft and every decision."""

from __future__ import annotations

import math
from collections import defaultdict
from fractions import Fraction

import pytest
import torch

from paceline.draft_tree import DraftTree
from paceline.drafts import DraftError, DrawRule
from paceline.sampling.batch import verify_step
from paceline.sampling.block import decide_block
from paceline.sampling.distribution import DraftDistribution
from paceline.sampling.draws import draw_children
from paceline.sampling.params import SamplingParams, VerifyMode
from paceline.sampling.verify import FinalKind, Verdict
from tests.sampling.chi_square import path_acceptance
from tests.sampling.enumeration import (
    ROOT,
    Shape,
    block_outcomes,
    drawn_entries,
    largest_gap,
    target_law,
    tree_outcomes,
    verified_tree,
)
from tests.sampling.rejection import decide_tree, drawn_chain
from tests.sampling.toy import Prefix, ToyModel

MODELS = [(0, 3, 0.0), (1, 4, 0.0), (2, 3, 0.4), (3, 4, 0.5), (4, 3, 0.6)]


def chain_shape(length: int) -> Shape:
    """A chain of draws."""
    shape: Shape = ()
    for _ in range(length):
        shape = (shape,)
    return shape


def law_of(
    target: ToyModel, drafter: ToyModel, gamma: int, rule: DrawRule = DrawRule.WITHOUT_REPLACEMENT
) -> tuple[dict[Prefix, Fraction], Fraction]:
    """The exact law of what one block commits, and the expected number of accepted tokens."""
    law: dict[Prefix, Fraction] = defaultdict(Fraction)
    accepted = Fraction(0)
    for entry, prob in drawn_entries(drafter, chain_shape(gamma), rule):
        for outcome in block_outcomes(verified_tree(entry, 8), target, drafter, decide_block):
            law[outcome.verdict.committed_tokens] += prob * outcome.prob
            accepted += prob * outcome.prob * len(outcome.verdict.accepted_tokens)
    return law, accepted


def accepted_by_rejection(target: ToyModel, drafter: ToyModel, gamma: int) -> Fraction:
    """Expected number of tokens that token-by-token rejection accepts."""
    accepted = Fraction(0)
    for entry, prob in drawn_entries(drafter, chain_shape(gamma), DrawRule.WITHOUT_REPLACEMENT):
        for outcome in tree_outcomes(verified_tree(entry, 8), target, drafter, decide_tree):
            accepted += prob * outcome.prob * len(outcome.verdict.accepted_tokens)
    return accepted


@pytest.mark.parametrize("rule", [DrawRule.WITHOUT_REPLACEMENT, DrawRule.TOP])
@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize(("seed", "vocab", "zeros"), MODELS)
def test_the_committed_tokens_have_the_targets_law(
    gamma: int, seed: int, vocab: int, zeros: float, rule: DrawRule
) -> None:
    if vocab**gamma > 30:
        gamma = 2  # the joint law of three tokens is enough with four symbols
    target, drafter = ToyModel(seed, vocab, zeros), ToyModel(seed + 100, vocab, zeros)
    law, _ = law_of(target, drafter, gamma, rule)
    assert sum(law.values()) == 1
    assert largest_gap(law, target, gamma + 1) < 1e-12


@pytest.mark.parametrize("seed", range(12))
def test_it_accepts_no_less_than_rejection(seed: int) -> None:
    """Sun et al., arXiv 2403.10444, Theorem 2; equal for one token, since then the rules are the same."""
    target, drafter = ToyModel(seed, 3, 0.2), ToyModel(seed + 100, 3, 0.2)
    assert law_of(target, drafter, 1)[1] == accepted_by_rejection(target, drafter, 1)
    assert law_of(target, drafter, 2)[1] >= accepted_by_rejection(target, drafter, 2)


class Fixed(ToyModel):
    """The same two-token distribution after every prefix."""

    def __init__(self, first: Fraction) -> None:
        super().__init__(0, 2)
        self._first = first

    def fractions(self, prefix: Prefix) -> list[Fraction]:
        """Next-token probabilities."""
        return [self._first, 1 - self._first]

    def probs(self, prefix: Prefix) -> torch.Tensor:
        """[2] float64"""
        return torch.tensor([float(value) for value in self.fractions(prefix)], dtype=torch.float64)


def test_the_example_of_the_paper() -> None:
    """Target (1/3, 2/3), drafter (2/3, 1/3), two tokens: 11/9 accepted against 10/9 (section 3)."""
    target, drafter = Fixed(Fraction(1, 3)), Fixed(Fraction(2, 3))

    def weights(model: Fixed) -> DraftDistribution:
        share = model.fractions(())[0]
        return DraftDistribution.of_weights(
            torch.tensor([0, 1]), torch.tensor([int(3 * share), 3 - int(3 * share)])
        )

    block, tokenwise = Fraction(0), Fraction(0)
    for first in range(2):
        for second in range(2):
            prob = drafter.fractions(())[first] * drafter.fractions(())[second]
            tree = drawn_chain([first, second], [weights(drafter)] * 2)
            for outcome in block_outcomes(tree, target, drafter, decide_block):
                block += prob * outcome.prob * len(outcome.verdict.accepted_tokens)
            for outcome in tree_outcomes(tree, target, drafter, decide_tree):
                tokenwise += prob * outcome.prob * len(outcome.verdict.accepted_tokens)
    assert (block, tokenwise) == (Fraction(11, 9), Fraction(10, 9))


def test_a_drafter_equal_to_the_target_is_always_accepted() -> None:
    target = ToyModel(7, 4)
    assert law_of(target, target, 2)[1] == 2


def test_keyed_blocks_have_the_targets_law() -> None:
    """Chi-square of four tokens over seeds, block after block through `verify_step`, each drafted anew.

    A block looks at tokens behind the ones it keeps: with numbers keyed by position, the drafter's or the verifier's,
    the next block would not be independent of it. With this drafter, far from the target, that gives a probability
    below 1e-8.
    """
    target, dist = (
        Fixed(Fraction(1, 2)),
        DraftDistribution.of_weights(torch.tensor([0, 1]), torch.tensor([9, 1])),
    )
    num_seeds, counts = 3000, defaultdict(int)
    logits = target.probs(()).log().float().repeat(4, 1)
    for seed in range(num_seeds):
        params = SamplingParams(seed=seed, mode=VerifyMode.BLOCK)
        text: Prefix = ()
        while len(text) < 4:
            start = ROOT + len(text)
            rule = DrawRule.WITHOUT_REPLACEMENT
            draws = [draw_children(dist, rule, 1, params, start, start + place) for place in range(3)]
            tree = drawn_chain([siblings.tokens[0] for siblings in draws], [dist] * 3)
            (verdict,) = verify_step(logits, [tree], [start], [params])
            text = (*text, *verdict.committed_tokens)
        counts[text[:4]] += 1
    expected = {text: float(prob) * num_seeds for text, prob in target_law(target, 4).items()}
    assert path_acceptance(counts, expected) > 1e-4


def test_a_later_token_may_make_up_for_an_earlier_one() -> None:
    """Token one falls short of its draft, token two more than makes up: kept together or not at all."""
    half = DraftDistribution.of_weights(torch.tensor([0, 1]), torch.tensor([1, 1]))
    tree = drawn_chain([0, 1], [half, half])
    probs = torch.tensor([[0.25, 0.75], [0.0, 1.0], [0.5, 0.5]], dtype=torch.float64)
    # s_1 = 1/2, s_2 = min(1, 1/2 * 2) = 1: accepted whatever the number for the first token is.
    verdict = decide_block(tree, probs, [math.nextafter(1, 0), 0.99], 0.25)
    assert verdict == Verdict((1, 2), (0, 1), 0, FinalKind.BONUS)


def test_nothing_drafted_is_a_plain_draw() -> None:
    probs = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
    assert decide_block(DraftTree(), probs, [], 0.75) == Verdict((), (), 1, FinalKind.PLAIN)


def test_trees_shapes_and_tokens_are_checked() -> None:
    probs = torch.full((3, 3), 1 / 3, dtype=torch.float64)
    fork = DraftTree((0, 1), (-1, -1), (1, 1), (1.0, 1.0), (None, None))
    with pytest.raises(ValueError, match="chains"):
        decide_block(fork, probs, [0.5, 0.5], 0.5)
    chain = DraftTree((0, 3), (-1, 0), (1, 2), (1.0, 1.0), (None, None))
    with pytest.raises(DraftError, match="vocabulary"):
        decide_block(chain, probs, [0.5, 0.5], 0.5)
    with pytest.raises(ValueError, match="drafts"):
        decide_block(chain, probs, [0.5], 0.5)


def test_a_token_that_its_own_drafter_excludes_is_never_accepted() -> None:
    dist = DraftDistribution.of_weights(torch.tensor([1]), torch.tensor([7]))
    tree = drawn_chain([0], [dist])
    probs = torch.tensor([[0.5, 0.0, 0.5]] * 2, dtype=torch.float64)
    assert decide_block(tree, probs, [5e-324], 0.75) == Verdict((), (), 2, FinalKind.RECOVERED)
