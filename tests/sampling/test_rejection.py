"""Chain rejection: the law of what is committed, by enumerating every decision."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch

from paceline.draft_tree import DraftTree
from paceline.drafts import DraftError, DrawRule, SiblingDraws
from paceline.sampling.batch import verify_step
from paceline.sampling.distribution import DraftDistribution
from paceline.sampling.draws import draw_children
from paceline.sampling.params import SamplingParams, VerifyMode
from paceline.sampling.verify import FinalKind, Verdict
from tests.sampling.rejection import decide_chain, drawn_chain, verify_chain_rejection
from tests.sampling.toy import Prefix, ToyModel

Cell = tuple[float, Fraction]  # a number inside a cell of [0, 1), and the cell's width


def cells(breaks: list[Fraction]) -> list[Cell]:
    """The unit interval cut at some points: a midpoint and a width per piece."""
    edges = sorted({Fraction(0), Fraction(1), *(edge for edge in breaks if 0 < edge < 1)})
    return [(float((low + high) / 2), high - low) for low, high in itertools.pairwise(edges)]


def cumulative(weights: list[Fraction]) -> list[Fraction]:
    total = sum(weights)
    return [value / total for value in itertools.accumulate(weights)] if total else []


def drawn(probs: torch.Tensor, seed: int, position: int) -> int:
    """A drafter's keyed draw."""
    params = SamplingParams(seed=seed, mode=VerifyMode.REJECTION)
    dist = DraftDistribution.dense(probs)
    return draw_children(dist, DrawRule.WITHOUT_REPLACEMENT, 1, params, position, position).tokens[0]


def law_of_round(target: ToyModel, drafter: ToyModel, gamma: int) -> dict[Prefix, Fraction]:
    """Exact law of the first gamma + 1 tokens when one round of `decide_chain` is followed by plain decoding.

    The code is a step function of its uniform numbers. It is evaluated once in every cell on which it is constant;
    the cell edges come from the rule in exact fractions, its outcomes from the code.
    """
    law: dict[Prefix, Fraction] = defaultdict(Fraction)
    for draft in itertools.product(range(target.vocab), repeat=gamma):
        draft_prob = math.prod(
            (drafter.fractions(draft[:i])[draft[i]] for i in range(gamma)), start=Fraction(1)
        )
        if not draft_prob:
            continue
        targets = torch.stack([target.probs(draft[:i]) for i in range(gamma + 1)])
        dists = [DraftDistribution.dense(drafter.probs(draft[:i])) for i in range(gamma)]
        accept_cells, final_cells = [], []
        for i in range(gamma):
            wanted, drawn = target.fractions(draft[:i]), drafter.fractions(draft[:i])
            accept_cells.append(cells([wanted[draft[i]] / drawn[draft[i]]]))
            final_cells.append(
                cells(cumulative([max(p - q, Fraction(0)) for p, q in zip(wanted, drawn, strict=True)]))
            )
        final_cells.append(cells(cumulative(target.fractions(draft))))
        for accept in itertools.product(*accept_cells):
            width = math.prod((cell[1] for cell in accept), start=Fraction(1))
            # Only the final number at the end of the walk matters; the walk does not depend on it.
            probe = decide_chain(draft, dists, targets, [cell[0] for cell in accept], [0.5] * (gamma + 1))
            end = len(probe.accepted_tokens)
            for noise, final_width in final_cells[end]:
                final = [0.5] * end + [noise] + [0.5] * (gamma - end)
                verdict = decide_chain(draft, dists, targets, [cell[0] for cell in accept], final)
                law[verdict.committed_tokens] += draft_prob * width * final_width
    return law


def extended(law: dict[Prefix, Fraction], target: ToyModel, length: int) -> Iterator[tuple[Prefix, Fraction]]:
    """Continue every outcome to a common length with the target's own tokens."""
    for prefix, prob in law.items():
        for rest in itertools.product(range(target.vocab), repeat=length - len(prefix)):
            joint = prob
            for token in rest:
                joint *= target.fractions(prefix)[token]
                prefix = (*prefix, token)
            yield prefix, joint
            prefix = prefix[: length - len(rest)]


@pytest.mark.parametrize("gamma", [1, 2])
@pytest.mark.parametrize(
    ("seed", "vocab", "zeros"), [(0, 3, 0.0), (1, 4, 0.0), (2, 3, 0.4), (3, 4, 0.5), (4, 3, 0.6)]
)
def test_the_committed_tokens_have_the_targets_law(gamma: int, seed: int, vocab: int, zeros: float) -> None:
    target, drafter = ToyModel(seed, vocab, zeros), ToyModel(seed + 100, vocab, zeros)
    law: dict[Prefix, Fraction] = defaultdict(Fraction)
    for prefix, prob in extended(law_of_round(target, drafter, gamma), target, gamma + 1):
        law[prefix] += prob
    for prefix in itertools.product(range(vocab), repeat=gamma + 1):
        wanted = math.prod(
            (target.fractions(prefix[:i])[prefix[i]] for i in range(gamma + 1)), start=Fraction(1)
        )
        assert abs(float(law[prefix] - wanted)) < 1e-12


def test_a_drafter_equal_to_the_target_is_always_accepted() -> None:
    target = ToyModel(7, 4)
    law = law_of_round(target, target, 2)
    assert {len(prefix) for prefix in law} == {3}


@pytest.mark.parametrize("seed", range(5))
def test_acceptance_is_the_overlap_of_the_distributions(seed: int) -> None:
    """P(accept) = sum of min(p, q) (Leviathan et al., arXiv 2211.17192, Theorem 3.5)."""
    target, drafter = ToyModel(seed, 4, 0.2), ToyModel(seed + 50, 4, 0.2)
    wanted, drawn = target.fractions(()), drafter.fractions(())
    accepted = Fraction(0)
    for token in range(4):
        if drawn[token]:
            probs = torch.stack([target.probs(()), target.probs((token,))])
            dists = [DraftDistribution.dense(drafter.probs(()))]
            for noise, width in cells([wanted[token] / drawn[token]]):
                verdict = decide_chain([token], dists, probs, [noise], [0.5, 0.5])
                accepted += drawn[token] * width * len(verdict.accepted_tokens)
    assert accepted == sum(map(min, wanted, drawn))


def test_the_comparison_is_strict() -> None:
    target = torch.tensor([[0.25, 0.75], [0.5, 0.5]], dtype=torch.float64)
    dists = [DraftDistribution.dense(torch.tensor([0.5, 0.5]))]
    below, at = math.nextafter(0.5, 0), 0.5
    assert decide_chain([0], dists, target, [below], [0.1, 0.1]).accepted_tokens == (0,)
    assert decide_chain([0], dists, target, [at], [0.1, 0.1]).accepted_tokens == ()


def test_a_token_of_probability_zero_is_never_accepted_nor_recovered() -> None:
    target = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    drawn = DraftDistribution.dense(torch.tensor([1.0, 0.0, 0.0]))
    for noise in (0.0, 5e-324, 0.5, math.nextafter(1, 0)):
        assert decide_chain([0], [drawn], target, [0.0], [noise] * 2) == Verdict(
            (), (), 1, FinalKind.RECOVERED
        )
        # The drafter claims to have drawn a token that its own distribution excludes.
        assert decide_chain([1], [drawn], target, [0.0], [noise] * 2) == Verdict(
            (), (), 1, FinalKind.RECOVERED
        )


def test_an_empty_residual_falls_back_to_the_target() -> None:
    """p and q equal, u rounded up to 1: rejection is impossible in exact arithmetic, and harmless here."""
    probs = torch.tensor([0.3, 0.7], dtype=torch.float64)
    verdict = decide_chain(
        [0], [DraftDistribution.dense(probs)], torch.stack([probs, probs]), [1.0], [0.9, 0.9]
    )
    assert verdict == Verdict((), (), 1, FinalKind.RECOVERED)


def test_nothing_drafted_is_a_plain_draw() -> None:
    verdict = decide_chain([], [], torch.tensor([[0.5, 0.5]], dtype=torch.float64), [], [0.75])
    assert verdict == Verdict((), (), 1, FinalKind.PLAIN)


def test_noise_is_keyed_by_position_and_not_by_history() -> None:
    """The decision at a position is the same whether earlier tokens came from this step or from steps before."""
    target, drafter = ToyModel(20, 4), ToyModel(21, 4)
    for seed in range(40):
        draft: Prefix = ()
        for position in range(4):
            draft = (*draft, drawn(drafter.probs(draft), seed, 10 + position))
        dists = [DraftDistribution.dense(drafter.probs(draft[:i])) for i in range(4)]
        probs = torch.stack([target.probs(draft[:i]) for i in range(5)])
        whole = verify_chain_rejection(draft, dists, probs, seed, 10)
        one_by_one: list[int] = []
        while True:
            i = len(one_by_one)
            if i == 4:
                final = verify_chain_rejection([], [], probs[4:], seed, 14)
                one_by_one.append(final.final_token)
                break
            step = verify_chain_rejection([draft[i]], dists[i : i + 1], probs[i : i + 2], seed, 10 + i)
            if not step.accepted_tokens:
                one_by_one.append(step.final_token)
                break
            one_by_one.append(draft[i])
        assert list(whole.committed_tokens) == one_by_one


def test_the_keyed_law_over_many_seeds_is_the_targets() -> None:
    """Chi-square over 6000 seeds of the joint law of two tokens, through `verify_step`; bound at about 1e-6."""
    target, drafter = ToyModel(31, 3), ToyModel(32, 3)
    num_seeds = 6000
    params = [SamplingParams(seed=seed, mode=VerifyMode.REJECTION) for seed in range(num_seeds)]
    dist = DraftDistribution.dense(drafter.probs(()))
    drafts = [drawn(drafter.probs(()), seed, 5) for seed in range(num_seeds)]
    trees = [drawn_chain([token], [dist]) for token in drafts]
    rows = {token: torch.stack([target.logits(()), target.logits((token,))]) for token in range(3)}
    step = verify_step(torch.cat([rows[token] for token in drafts]), trees, [5] * num_seeds, params)
    counts: dict[Prefix, int] = defaultdict(int)
    for param, verdict in zip(params, step, strict=True):
        tokens = verdict.committed_tokens
        if len(tokens) == 1:
            plain = verify_step(target.logits(tokens)[None], [DraftTree()], [6], [param])[0]
            tokens = (*tokens, plain.final_token)
        counts[tokens] += 1
    statistic = 0.0
    for pair in itertools.product(range(3), repeat=2):
        expected = num_seeds * float(target.fractions(())[pair[0]] * target.fractions(pair[:1])[pair[1]])
        statistic += (counts[pair] - expected) ** 2 / expected
    assert statistic < 42.7  # 8 degrees of freedom


def test_truncated_distributions_are_what_was_sampled_from() -> None:
    dist = DraftDistribution.truncated(torch.tensor([4, 1]), torch.tensor([0.75, 0.251]), 6)
    assert float(dist.probs.sum()) == pytest.approx(1, abs=1e-15)
    assert dist.prob(2) == 0
    uniform_probs = torch.full((6,), 1 / 6, dtype=torch.float64)
    residual = dist.subtracted_from(uniform_probs)
    assert residual[[0, 2, 3, 5]].tolist() == uniform_probs[:4].tolist()
    assert residual[[1, 4]].tolist() == [0.0, 0.0]
    assert DraftDistribution.point_mass(3).prob(3) == 1


@pytest.mark.parametrize(
    ("ids", "probs"),
    [
        ([], []),
        ([0], [0.5, 0.5]),
        ([0, 6], [0.5, 0.5]),
        ([-1, 0], [0.5, 0.5]),
        ([1, 1], [0.5, 0.5]),
        ([0, 1], [1.5, -0.5]),
        ([0, 1], [math.nan, 1.0]),
        ([0, 1], [math.inf, 0.0]),
        ([0, 1], [0.2, 0.2]),
    ],
)
def test_distributions_from_a_peer_are_checked(ids: list[int], probs: list[float]) -> None:
    with pytest.raises(DraftError):
        DraftDistribution.truncated(torch.tensor(ids, dtype=torch.int64), torch.tensor(probs), 6)


def test_tokens_are_checked_before_they_index() -> None:
    probs = torch.full((2, 3), 1 / 3, dtype=torch.float64)
    for token in (-1, 3, 10**9):
        with pytest.raises(DraftError):
            decide_chain([token], [DraftDistribution.point_mass(0)], probs, [0.5], [0.5, 0.5])


def test_a_token_that_was_not_drawn_counts_as_certain() -> None:
    """Without a distribution a token is accepted with the target's own probability of it."""
    dist = DraftDistribution.dense(torch.tensor([0.0, 1.0]))
    draws = SiblingDraws((1,), DrawRule.WITHOUT_REPLACEMENT, dist)
    tree = DraftTree((1, 1), (-1, 0), (1, 2), (1.0, 1.0), (draws, None))
    logits = torch.tensor([[-torch.inf, 0.0], [0.0, 0.0], [0.0, -torch.inf]])
    num_seeds = 2000
    params = [SamplingParams(seed=seed, mode=VerifyMode.REJECTION) for seed in range(num_seeds)]
    step = verify_step(logits.repeat(num_seeds, 1), [tree] * num_seeds, [5] * num_seeds, params)
    accepted = sum(verdict == Verdict((1, 2), (1, 1), 0, FinalKind.BONUS) for verdict in step)
    refused = sum(verdict == Verdict((1,), (1,), 0, FinalKind.RECOVERED) for verdict in step)
    assert accepted + refused == num_seeds
    assert abs(accepted - num_seeds / 2) < 5 * math.sqrt(num_seeds / 4)
