"""Recursive rejection on trees: its law, by enumerating every draft and every decision."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, defaultdict
from fractions import Fraction

import pytest
import torch

from paceline.draft_tree import DraftTree
from paceline.drafts import DraftEntry, DraftError, DrawRule, SiblingDraws
from paceline.sampling.batch import verify_step
from paceline.sampling.distribution import DraftDistribution
from paceline.sampling.draws import draw_children, draw_siblings
from paceline.sampling.params import SamplingParams, VerifyMode
from paceline.sampling.verify import FinalKind, Verdict
from paceline.scheduling import allocate_nodes
from tests.sampling.chi_square import path_acceptance
from tests.sampling.enumeration import (
    ROOT,
    Shape,
    cells,
    cumulative,
    draw_sequences,
    drawn_entries,
    largest_gap,
    target_law,
    tree_outcomes,
    verified_tree,
)
from tests.sampling.rejection import decide_tree
from tests.sampling.toy import Prefix, ToyModel

CHAIN: Shape = (((),),)
FAN: Shape = ((), (), ())
SIBLING_CHAIN: Shape = (((), ()), ())
BUSHY: Shape = (((), ()), ((),))
DRAWN = (DrawRule.WITH_REPLACEMENT, DrawRule.WITHOUT_REPLACEMENT)
MODELS = [(0, 3, 0.0), (1, 4, 0.0), (2, 3, 0.4), (3, 4, 0.5), (4, 3, 0.6)]


def law_of(
    target: ToyModel, drafter: ToyModel, shape: Shape, rule: DrawRule, budget: int
) -> tuple[dict[Prefix, Fraction], Fraction]:
    """The exact law of what one round commits, and the probability that it accepts anything."""
    law: dict[Prefix, Fraction] = defaultdict(Fraction)
    accepted = Fraction(0)
    for entry, prob in drawn_entries(drafter, shape, rule):
        for outcome in tree_outcomes(verified_tree(entry, budget), target, drafter, decide_tree):
            law[outcome.verdict.committed_tokens] += prob * outcome.prob
            accepted += prob * outcome.prob * bool(outcome.verdict.accepted_tokens)
    return law, accepted


@pytest.mark.parametrize("rule", list(DrawRule))
@pytest.mark.parametrize(
    ("shape", "budget"), [(CHAIN, 8), (FAN, 8), (SIBLING_CHAIN, 8), (SIBLING_CHAIN, 2), (SIBLING_CHAIN, 3)]
)
@pytest.mark.parametrize(("seed", "vocab", "zeros"), MODELS)
def test_the_committed_tokens_have_the_targets_law(
    seed: int, vocab: int, zeros: float, shape: Shape, budget: int, rule: DrawRule
) -> None:
    target, drafter = ToyModel(seed, vocab, zeros), ToyModel(seed + 100, vocab, zeros)
    law, accepted = law_of(target, drafter, shape, rule, budget)
    assert sum(law.values()) == 1
    assert accepted > 0
    assert largest_gap(law, target, 3) < 1e-12


@pytest.mark.parametrize("rule", list(DrawRule))
def test_branches_below_several_siblings_have_the_targets_law(rule: DrawRule) -> None:
    target, drafter = ToyModel(5, 3), ToyModel(105, 3)
    for budget in (4, 8):
        law, _ = law_of(target, drafter, BUSHY, rule, budget)
        assert largest_gap(law, target, 3) < 1e-12


def test_a_tree_cut_by_drawn_values_would_be_biased() -> None:
    """What the choice of nodes guards against: the likelier of two draws alone verified is not the target's law."""
    target, drafter = ToyModel(0, 3), ToyModel(100, 3)
    law: dict[Prefix, Fraction] = defaultdict(Fraction)
    for entry, prob in drawn_entries(drafter, ((), ()), DrawRule.WITHOUT_REPLACEMENT):
        assert entry.draft_dists is not None
        best = max(entry.tokens, key=lambda token: drafter.fractions(())[token])
        dist = entry.draft_dists[0]
        assert dist is not None
        only = SiblingDraws((best,), dist.rule, dist.distribution)
        tree = verified_tree(DraftEntry(ROOT, (best,), (-1,), (), (), (only,)), 8)
        for outcome in tree_outcomes(tree, target, drafter, decide_tree):
            law[outcome.verdict.committed_tokens] += prob * outcome.prob
    assert largest_gap(law, target, 1) > 1e-3


def _said(prefix: Prefix, draws: Prefix) -> float:
    """A confidence as it should be: whatever the drafter makes of the path, whatever was drawn."""
    return random.Random(f"said:{prefix}").choice([0.05, 0.3, 0.6, 0.95]) if prefix else 0.9


def _law_of_cut(
    target: ToyModel, drafter: ToyModel, shape: Shape, budget: int, times: list[float], is_rejection: bool
) -> dict[Prefix, Fraction]:
    """The law of a round that verifies what confidences make of a draft, under step times by the number of rows."""
    law: dict[Prefix, Fraction] = defaultdict(Fraction)
    for entry, prob in drawn_entries(drafter, shape, DrawRule.WITHOUT_REPLACEMENT, _said):
        tree = verified_tree(entry, budget)
        (count,) = allocate_nodes([tree.path_acceptances], times.__getitem__, is_rejection=is_rejection)
        for outcome in tree_outcomes(tree.head(count), target, drafter, decide_tree):
            law[outcome.verdict.committed_tokens] += prob * outcome.prob
    return law


@pytest.mark.parametrize("shape", [CHAIN, SIBLING_CHAIN, BUSHY])
def test_cutting_by_confidences_said_before_the_draws_keeps_the_targets_law(shape: Shape) -> None:
    """Whether a draw is verified depends on the draws above it, by the trie's order, its budget and the early stop."""
    target, drafter = ToyModel(6, 3), ToyModel(106, 3)
    source, sizes = random.Random(5), set()
    for budget in (1, 2, 3, 8):
        for is_rejection in (True, False):
            # A step that costs the same whatever its rows leaves the cut to the budget, in either search.
            law = _law_of_cut(target, drafter, shape, budget, [1.0] * 9, is_rejection)
            assert largest_gap(law, target, 3) < 1e-12
    for _ in range(4):
        times = list(itertools.accumulate((source.uniform(0.0, 0.6) for _ in range(8)), initial=1.0))
        assert largest_gap(_law_of_cut(target, drafter, shape, 8, times, True), target, 3) < 1e-12
        for entry, _ in drawn_entries(drafter, shape, DrawRule.WITHOUT_REPLACEMENT, _said):
            path_acceptances = verified_tree(entry, 8).path_acceptances
            sizes.add(allocate_nodes([path_acceptances], times.__getitem__, is_rejection=True))
    assert len(sizes) > 1  # the draft decides how much of it is verified


def test_a_confidence_said_after_the_draw_would_be_biased() -> None:
    target, drafter = ToyModel(6, 3), ToyModel(106, 3)

    def after(prefix: Prefix, draws: Prefix) -> float:
        return 0.9 if draws[0] == 1 else 0.1

    law: dict[Prefix, Fraction] = defaultdict(Fraction)
    for entry, prob in drawn_entries(drafter, CHAIN, DrawRule.WITHOUT_REPLACEMENT, after):
        tree = verified_tree(entry, 8)
        (count,) = allocate_nodes([tree.path_acceptances], lambda rows: 1.0 + 0.4 * rows, is_rejection=True)
        for outcome in tree_outcomes(tree.head(count), target, drafter, decide_tree):
            law[outcome.verdict.committed_tokens] += prob * outcome.prob
    assert largest_gap(law, target, 1) > 1e-3


@pytest.mark.parametrize("seed", range(6))
def test_acceptance_at_a_node(seed: int) -> None:
    """One node's acceptance against formulas that know nothing of the walk.

    One draw: the overlap 1 - TV, whatever the rule. With replacement p_j does not depend on the draws, so that k
    draws fail with the product of 1 - overlap(p_j, q). Likeliest tokens: their mass under the target.
    """
    target, drafter = ToyModel(seed, 4, 0.2), ToyModel(seed + 50, 4, 0.2)
    wanted, drawn = target.fractions(()), drafter.fractions(())
    rates: dict[DrawRule, list[Fraction]] = {
        rule: [law_of(target, drafter, ((),) * count, rule, 8)[1] for count in (1, 2, 3)] for rule in DrawRule
    }
    overlap = sum(map(min, wanted, drawn), Fraction(0))
    assert rates[DrawRule.WITH_REPLACEMENT][0] == rates[DrawRule.WITHOUT_REPLACEMENT][0] == overlap

    residual, failed = list(wanted), Fraction(1)
    for rate in rates[DrawRule.WITH_REPLACEMENT]:
        failed *= 1 - sum(map(min, residual, drawn), Fraction(0))
        difference = [max(p - q, Fraction(0)) for p, q in zip(residual, drawn, strict=True)]
        residual = [value / sum(difference) for value in difference] if sum(difference) else residual
        assert rate == 1 - failed

    ranked = sorted(range(4), key=lambda token: (-drawn[token], token))
    for count, rate in enumerate(rates[DrawRule.TOP], start=1):
        assert rate == sum((wanted[token] for token in ranked[:count]), Fraction(0))

    for rates_of_rule in rates.values():
        assert sorted(rates_of_rule) == rates_of_rule  # more candidates are never worse
    assert all(
        without >= with_
        for without, with_ in zip(
            rates[DrawRule.WITHOUT_REPLACEMENT], rates[DrawRule.WITH_REPLACEMENT], strict=True
        )
    )


@pytest.mark.parametrize("rule", DRAWN)
@pytest.mark.parametrize("seed", [0, 2])
def test_siblings_are_drawn_by_their_rule(seed: int, rule: DrawRule) -> None:
    """The exact law of three draws, by running the code in every cell of its numbers."""
    drafter = ToyModel(seed, 4, 0.4)
    dist = drafter.distribution(())
    ids = dist.token_ids.tolist()
    for tokens, prob in draw_sequences(drafter.fractions(()), rule, 3):
        left = [drafter.fractions(())[token] for token in ids]
        low_noise, high_noise, width = [], [], Fraction(1)
        for token in tokens:
            place = ids.index(token)
            shares = cumulative(left)
            below = shares[place - 1] if place else Fraction(0)
            low, high, part = next(c for c in cells(shares) if abs(c[0] - float(below)) < 1e-8)
            low_noise.append(low)
            high_noise.append(high)
            width *= part
            if rule is DrawRule.WITHOUT_REPLACEMENT:
                left[place] = Fraction(0)
        assert width == prob
        padding = [0.5] * (3 - len(tokens))  # without replacement a small support runs out
        for noise in (low_noise, high_noise):
            assert draw_siblings(dist, rule, [*noise, *padding]).tokens == tokens


@pytest.mark.parametrize("rule", DRAWN)
def test_keyed_rounds_have_the_targets_law(rule: DrawRule) -> None:
    """Chi-square of four tokens over seeds, round after round through `verify_step`, each drafted anew.

    Several rounds, so that a number used twice would show.
    """
    target, drafter = ToyModel(61, 3), ToyModel(62, 3)
    num_seeds, counts = 2000, defaultdict(int)
    for seed in range(num_seeds):
        params = SamplingParams(seed=seed, mode=VerifyMode.REJECTION)
        text: Prefix = ()
        while len(text) < 4:
            start = ROOT + len(text)
            first = draw_children(drafter.distribution(text), rule, 2, params, start, start)
            below = (*text, first.tokens[0])
            second = draw_children(drafter.distribution(below), rule, 2, params, start, start + 1)
            draws = (first,) * 2 + (second,) * 2
            tree = DraftTree((*first.tokens, *second.tokens), (-1, -1, 0, 0), (1, 1, 2, 2), (1.0,) * 4, draws)
            paths = [text, *((*text, t) for t in first.tokens), *((*below, t) for t in second.tokens)]
            logits = torch.stack([target.logits(path) for path in paths])
            (verdict,) = verify_step(logits, [tree], [start], [params])
            text = (*text, *verdict.committed_tokens)
        counts[text[:4]] += 1
    expected = {text: float(prob) * num_seeds for text, prob in target_law(target, 4).items()}
    assert path_acceptance(counts, expected) > 1e-4


def test_siblings_have_numbers_of_their_own() -> None:
    """With one number for all, the second of three equally likely siblings would come half as often as it should."""
    tree = DraftTree((0, 1, 2), (-1,) * 3, (1,) * 3, (1.0,) * 3, (None,) * 3)
    probs = [0.3, 0.3, 0.3, 0.1]
    num_seeds = 2000
    logits = torch.tensor(probs).log().repeat(4 * num_seeds, 1)
    params = [SamplingParams(seed=seed, mode=VerifyMode.REJECTION) for seed in range(num_seeds)]
    step = verify_step(logits, [tree] * num_seeds, [ROOT] * num_seeds, params)
    counts = Counter(verdict.committed_tokens[0] for verdict in step)
    assert path_acceptance(counts, {token: prob * num_seeds for token, prob in enumerate(probs)}) > 1e-4


def test_siblings_of_two_draws_are_refused() -> None:
    dist = DraftDistribution.of_weights(torch.tensor([0, 1]), torch.tensor([1, 1]))
    draws = [SiblingDraws((token,), DrawRule.WITHOUT_REPLACEMENT, dist) for token in (0, 1)]
    tree = DraftTree((0, 1), (-1, -1), (1, 1), (1.0, 1.0), tuple(draws))
    probs = torch.tensor([[0.0, 0.0, 1.0]] * 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="two draws"):
        decide_tree(tree, probs, [0.5, 0.5], [0.5, 0.5])


def test_a_drafter_that_lies_costs_nothing_but_acceptance() -> None:
    """Draws that its own distribution excludes, or more of them than it has tokens, are refused, and nothing breaks."""
    dist = DraftDistribution.of_weights(torch.tensor([1]), torch.tensor([7]))
    draws = SiblingDraws((1, 2, 0), DrawRule.WITHOUT_REPLACEMENT, dist)
    tree = DraftTree((1, 2, 0), (-1,) * 3, (1,) * 3, (1.0,) * 3, (draws,) * 3)
    probs = torch.tensor([[0.5, 0.0, 0.5]] * 4, dtype=torch.float64)
    for noise in (0.25, 0.75):
        verdict = decide_tree(tree, probs, [0.0] * 3, [noise, 0.5])
        assert verdict == Verdict((), (), 0 if noise < 0.5 else 2, FinalKind.RECOVERED)


def test_shapes_and_tokens_are_checked() -> None:
    tree = DraftTree((0, 3), (-1, 0), (1, 2), (1.0, 1.0), (None, None))
    probs = torch.full((3, 3), 1 / 3, dtype=torch.float64)
    with pytest.raises(DraftError, match="vocabulary"):
        decide_tree(tree, probs, [0.5, 0.5], [0.5] * 3)
    with pytest.raises(ValueError, match="nodes"):
        decide_tree(tree, probs[:2], [0.5, 0.5], [0.5] * 3)
    with pytest.raises(ValueError, match="depths"):
        decide_tree(tree, probs, [0.5, 0.5], [0.5] * 2)
    assert decide_tree(DraftTree(), probs[:1], [], [math.nextafter(1, 0)]) == Verdict(
        (), (), 2, FinalKind.PLAIN
    )


@pytest.mark.parametrize("num_threads", [1, 2])
def test_sequences_of_a_step_are_decided_as_alone(num_threads: int) -> None:
    """They walk down together, measuring rows ahead of the walks: that may not show."""
    generator = torch.Generator().manual_seed(5)
    trees = [
        DraftTree(),
        DraftTree((3, 5, 7), (-1, 0, 1), (1, 2, 3), (0.5,) * 3, (None,) * 3),
        DraftTree((3, 4, 5, 6), (-1, -1, 0, 1), (1, 1, 2, 2), (0.5,) * 4, (None,) * 4),
    ]
    params = [SamplingParams(top_p=0.9, mode=VerifyMode.REJECTION, seed=seed) for seed in range(len(trees))]
    accepted, before = 0, torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for start in range(100):
            logits = [torch.randn(len(tree) + 1, 600, generator=generator) for tree in trees]
            for own in logits:
                own[:, 3:8] += 6
            together = verify_step(torch.cat(logits), trees, [start] * len(trees), params)
            for verdict, own, tree, param in zip(together, logits, trees, params, strict=True):
                assert verify_step(own, [tree], [start], [param]) == [verdict]
                accepted += len(verdict.accepted_tokens)
    finally:
        torch.set_num_threads(before)
    assert accepted > 30
