"""Exact laws of verification, by running it once in every cell of its uniform numbers.

Verification is a step function of its uniform numbers. The edges of the cells come from the rule in exact fractions,
the outcomes from the code, which is run close to both ends of every cell: where its own edge lies elsewhere, the two
disagree.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from paceline.draft_tree import DraftTree
from paceline.drafts import DraftEntry, DrawRule, SiblingDraws
from paceline.sampling.verify import Verdict
from paceline.trie import DraftTrie
from tests.sampling.toy import Prefix, ToyModel

TINY = 1e-9
ROOT = 5
"""Committed length at which every toy draft begins; toy models see only what follows."""

Shape = tuple["Shape", ...]
"""A tree of draws: for each draw at a node the draws below it."""

Cell = tuple[float, float, Fraction]
"""Two numbers close to the ends of a piece of [0, 1), and its width."""


@dataclass(frozen=True)
class Outcome:
    """What the code did in one cell, and the probability of that cell."""

    verdict: Verdict
    prob: Fraction


def cells(edges: Sequence[Fraction]) -> list[Cell]:
    """The unit interval cut at some points; a number outside cuts nothing."""
    points = sorted({Fraction(0), Fraction(1), *(edge for edge in edges if 0 < edge < 1)})
    return [(float(low) + TINY, float(high) - TINY, high - low) for low, high in itertools.pairwise(points)]


def cumulative(weights: Sequence[Fraction]) -> list[Fraction]:
    """Running sums, as shares of the whole."""
    total = sum(weights)
    return [value / total for value in itertools.accumulate(weights)]


def draw_sequences(
    probs: Sequence[Fraction], rule: DrawRule, count: int
) -> Iterator[tuple[tuple[int, ...], Fraction]]:
    """Every outcome of some draws, with its probability; without replacement they end with the support."""
    if count == 0 or not sum(probs):
        yield (), Fraction(1)
        return
    total = sum(probs)
    for token, prob in enumerate(probs):
        if not prob:
            continue
        left = list(probs)
        if rule is DrawRule.WITHOUT_REPLACEMENT:
            left[token] = Fraction(0)
        for rest, rest_prob in draw_sequences(left, rule, count - 1):
            yield (token, *rest), prob / total * rest_prob


def drawn_entries(
    drafter: ToyModel,
    shape: Shape,
    rule: DrawRule,
    said: Callable[[Prefix, Prefix], float] | None = None,
) -> Iterator[tuple[DraftEntry, Fraction]]:
    """Every draft of a shape that a drafter may make, with its probability.

    Args:
        drafter: what is drawn from.
        shape: of the draft.
        rule: of the draws.
        said: confidence of a node's first draw, given the path to the node and, to do what must not be done, the draws.
    """

    def below(
        prefix: Prefix, part: Shape
    ) -> Iterator[tuple[list[tuple[Prefix, SiblingDraws | None]], Fraction]]:
        if not part:
            yield [], Fraction(1)
            return
        if rule is DrawRule.TOP:
            probs = drafter.fractions(prefix)
            best = tuple(sorted(range(drafter.vocab), key=lambda t: (-probs[t], t))[: len(part)])
            sequences = [(best, Fraction(1))]
        else:
            sequences = list(draw_sequences(drafter.fractions(prefix), rule, len(part)))
        for tokens, prob in sequences:
            sure = None if said is None else said(prefix, tokens)
            dist = drafter.distribution(prefix)
            draws = None if rule is DrawRule.TOP else SiblingDraws(tokens, rule, dist, sure)
            subtrees = []
            for place, token in enumerate(tokens):
                is_repeat = token in tokens[:place]
                subtrees.append(list(below((*prefix, token), () if is_repeat else part[place])))
            for chosen in itertools.product(*subtrees):
                nodes = [((*prefix, token), draws) for token in tokens]
                nodes += [node for nested, _ in chosen for node in nested]
                yield nodes, prob * math.prod((share for _, share in chosen), start=Fraction(1))

    for nodes, prob in below((), shape):
        place: dict[Prefix, int] = {(): -1}
        tokens, parents, draws, confidences = [], [], [], []
        for index, (path, siblings) in enumerate(nodes):
            tokens.append(path[-1])
            parents.append(place[path[:-1]])
            place.setdefault(path, index)
            draws.append(siblings)
            confidences.append(float(drafter.fractions(path[:-1])[path[-1]]))
        yield (
            DraftEntry(
                ROOT, tuple(tokens), tuple(parents), (), () if said else tuple(confidences), tuple(draws)
            ),
            prob,
        )


def verified_tree(entry: DraftEntry, budget: int) -> DraftTree:
    """What the verifier makes of an entry, by way of the trie."""
    trie = DraftTrie(list(range(1, ROOT + 1)))
    trie.add(entry)
    return trie.select_drawn_tree(budget, 8)


def paths_of(tree: DraftTree) -> list[Prefix]:
    """The text that leads to each row of a tree, the root's first."""
    paths: list[Prefix] = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*paths[parent + 1], token))
    return paths


def target_rows(tree: DraftTree, target: ToyModel) -> torch.Tensor:
    """[nodes + 1, vocab] float64"""
    return torch.stack([target.probs(path) for path in paths_of(tree)])


@dataclass(frozen=True)
class _Walk:
    """One way down a tree: the cell of each node's number, and what is left of the distribution at its end."""

    node_cells: dict[int, Cell]
    depth: int
    residual: list[Fraction]


def _walks(tree: DraftTree, target: ToyModel, drafter: ToyModel) -> Iterator[_Walk]:
    paths = paths_of(tree)

    def down(row: int, depth: int, known: dict[int, Cell]) -> Iterator[_Walk]:
        residual = list(target.fractions(paths[row]))
        left = list(drafter.fractions(paths[row]))
        for node in (n for n, parent in enumerate(tree.parents) if parent + 1 == row):
            token, draws = tree.tokens[node], tree.draft_dists[node]
            if draws is None:
                drawn = [Fraction(int(t == token)) for t in range(target.vocab)]
            else:
                drawn = [value / sum(left) for value in left]
                if draws.rule is DrawRule.WITHOUT_REPLACEMENT:
                    left[token] = Fraction(0)
            accepted = min(Fraction(1), residual[token] / drawn[token])
            if accepted:
                yield from down(node + 1, depth + 1, {**known, node: cells([accepted])[0]})
            if accepted == 1:
                return
            known = {**known, node: cells([accepted])[-1]}
            difference = [max(p - q, Fraction(0)) for p, q in zip(residual, drawn, strict=True)]
            residual = [value / sum(difference) for value in difference]
        yield _Walk(known, depth, residual)

    yield from down(0, 0, {})


def tree_outcomes(
    tree: DraftTree,
    target: ToyModel,
    drafter: ToyModel,
    decide: Callable[[DraftTree, torch.Tensor, list[float], list[float]], Verdict],
) -> Iterator[Outcome]:
    """Every outcome of `decide_tree` on one drafted tree."""
    rows = target_rows(tree, target)
    num_depths = max(tree.depths, default=0) + 1
    for walk in _walks(tree, target, drafter):
        width = math.prod((cell[2] for cell in walk.node_cells.values()), start=Fraction(1))
        for low, high, final_width in cells(cumulative(walk.residual)):
            verdicts = []
            for end, final in ((0, low), (1, high)):
                accept = [walk.node_cells.get(node, (0.5, 0.5, 1))[end] for node in range(len(tree))]
                verdicts.append(decide(tree, rows, accept, [final] * num_depths))
            assert verdicts[0] == verdicts[1], "an edge lies elsewhere"
            yield Outcome(verdicts[0], width * final_width)


def block_outcomes(
    tree: DraftTree,
    target: ToyModel,
    drafter: ToyModel,
    decide: Callable[[DraftTree, torch.Tensor, list[float], float], Verdict],
) -> Iterator[Outcome]:
    """Every outcome of `decide_block` on one drafted chain."""
    rows, paths, length = target_rows(tree, target), paths_of(tree), len(tree)
    keep = [Fraction(1)]
    for index, token in enumerate(tree.tokens):
        ratio = target.fractions(paths[index])[token] / _drawn(tree, drafter, index, target.vocab)[token]
        keep.append(min(Fraction(1), keep[-1] * ratio))
    edges, residuals = [], []
    for index in range(length):
        scaled = [keep[index] * p for p in target.fractions(paths[index])]
        drawn = _drawn(tree, drafter, index, target.vocab)
        residuals.append([max(p - q, Fraction(0)) for p, q in zip(scaled, drawn, strict=True)])
        mass = sum(residuals[-1], Fraction(0))
        edges.append(Fraction(1) if keep[index] == 1 else mass / (mass + 1 - keep[index]))
    edges.append(keep[length])
    residuals.append(list(target.fractions(paths[length])))
    for accept in itertools.product(*(cells([edge]) for edge in edges[1:])):
        width = math.prod((cell[2] for cell in accept), start=Fraction(1))
        kept = max((i for i in range(1, length + 1) if accept[i - 1][1] < edges[i]), default=0)
        if not sum(residuals[kept]):
            assert not width or keep[kept] == 1
            residuals[kept] = list(target.fractions(paths[kept]))
        for low, high, final_width in cells(cumulative(residuals[kept])):
            first = decide(tree, rows, [cell[0] for cell in accept], low)
            second = decide(tree, rows, [cell[1] for cell in accept], high)
            assert first == second, "an edge lies elsewhere"
            yield Outcome(first, width * final_width)


def _drawn(tree: DraftTree, drafter: ToyModel, node: int, vocab: int) -> list[Fraction]:
    if tree.draft_dists[node] is None:
        return [Fraction(int(token == tree.tokens[node])) for token in range(vocab)]
    return drafter.fractions(paths_of(tree)[node])


def extended(law: dict[Prefix, Fraction], target: ToyModel, length: int) -> dict[Prefix, Fraction]:
    """Continue every outcome to a common length with the target's own tokens; longer ones are cut."""
    whole: dict[Prefix, Fraction] = defaultdict(Fraction)
    for prefix, prob in law.items():
        for rest in itertools.product(range(target.vocab), repeat=max(0, length - len(prefix))):
            text, joint = prefix, prob
            for token in rest:
                joint *= target.fractions(text)[token]
                text = (*text, token)
            whole[text[:length]] += joint
    return whole


def target_law(target: ToyModel, length: int) -> dict[Prefix, Fraction]:
    """The target's own law of some tokens."""
    return extended({(): Fraction(1)}, target, length)


def largest_gap(law: dict[Prefix, Fraction], target: ToyModel, length: int) -> float:
    """Largest difference of probabilities between a law and the target's."""
    wanted, found = target_law(target, length), extended(law, target, length)
    return max(abs(float(wanted.get(text, 0) - found.get(text, 0))) for text in {*wanted, *found})
