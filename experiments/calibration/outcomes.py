"""Verified trees as they came, and a calibrator run over them.

Responsible for: recording what became of drafted tokens, the JSON form of a recording, replaying it to a calibrator
that learns, and measuring one that does not on prompts it never saw.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from experiments.decoding.generation import Pass
from paceline.scheduling.calibration import CalibrationError, Calibrator, Node


class VerifiedTree(NamedTuple):
    """One verified tree, node by node: what the drafter said of it, where it hangs, and whether it was accepted."""

    log_probs: tuple[float, ...]
    positions: tuple[int, ...]
    parents: tuple[int, ...]
    accepted: tuple[bool, ...]


@dataclass(slots=True)
class Recording:
    """The trees of one prompt's generations."""

    trees: list[VerifiedTree] = field(default_factory=list)

    def watch(self, one: Pass) -> None:
        """Note a pass's tree, unless its drafter said nothing of some node."""
        tree, verdict = one.tree, one.verdict
        claims = [claim for claim in tree.claims if claim is not None]
        if not claims or len(claims) != len(tree):
            return
        accepted = set(verdict.accepted_rows)
        self.trees.append(
            VerifiedTree(
                tuple(round(claim.log_prob, 2) for claim in claims),
                tuple(claim.position for claim in claims),
                tree.parents,
                tuple(row in accepted for row in range(1, len(tree) + 1)),
            )
        )

    def to_list(self) -> list[list[list[float]]]:
        """A JSON value."""
        return [
            [list(t.log_probs), list(t.positions), list(t.parents), [int(a) for a in t.accepted]]
            for t in self.trees
        ]

    @classmethod
    def from_list(cls, value: Iterable[Sequence[Sequence[Any]]]) -> Recording:
        """Read `to_list`'s value back."""
        return cls(
            [
                VerifiedTree(
                    tuple(float(lp) for lp in log_probs),
                    tuple(positions),
                    tuple(parents),
                    tuple(bool(a) for a in accepted),
                )
                for log_probs, positions, parents, accepted in value
            ]
        )


@dataclass(frozen=True, slots=True)
class Errors:
    """Expected calibration errors, from 0 to 1, over 20 bins.

    Attributes:
        own: of the drafter's probabilities, token by token.
        token: of calibrated confidences.
        own_path: of products of the drafter's probabilities along paths, over all verified tokens.
        path: of products of calibrated confidences.
        num_trials: verified tokens with all before them accepted.
        floor: what `token` would be on average if every confidence were exactly right: so many trials tell no less.
    """

    own: float
    token: float
    own_path: float
    path: float
    num_trials: int
    floor: float


def nodes_of(calibrator: Calibrator, tree: VerifiedTree) -> list[Node]:
    """The tree as a verifier would have seen it, with this calibrator's confidences."""
    nodes: list[Node] = []
    for log_prob, position, parent, accepted in zip(*tree, strict=True):
        above = 1.0 if parent < 0 else nodes[parent].path_acceptance
        path_acceptance = above * calibrator.confidence(log_prob, position)
        nodes.append(Node(parent, log_prob, position, path_acceptance, accepted))
    return nodes


def learn(calibrator: Calibrator, recordings: Iterable[Recording]) -> None:
    """Let a calibrator see recordings, as it would online."""
    for recording in recordings:
        for tree in recording.trees:
            calibrator.observe(nodes_of(calibrator, tree))


def held_out_errors(by_prompt: Sequence[Recording], num_folds: int = 3) -> Errors:
    """Errors on prompts that a calibrator has not seen.

    Each prompt is held out once: a calibrator learns from those of the other folds and stands still while it is
    measured.
    """
    folds: list[tuple[Calibrator, list[Recording]]] = []
    for fold in range(num_folds):
        calibrator = Calibrator()
        learn(calibrator, (seen for i, seen in enumerate(by_prompt) if i % num_folds != fold))
        folds.append((calibrator, [held for i, held in enumerate(by_prompt) if i % num_folds == fold]))
    return measure(folds)


def measure(folds: Iterable[tuple[Calibrator, Iterable[Recording]]]) -> Errors:
    """The errors of calibrators that learn nothing from what they are measured on, taken together."""
    own, token, own_path, path = (CalibrationError(math.inf) for _ in range(4))
    variances: dict[int, float] = {}
    for calibrator, recordings in folds:
        for tree in (tree for recording in recordings for tree in recording.trees):
            nodes = nodes_of(calibrator, tree)
            products: list[float] = []
            for node, log_prob in zip(nodes, tree.log_probs, strict=True):
                products.append(math.exp(log_prob) * (1.0 if node.parent < 0 else products[node.parent]))
                own_path.observe(products[-1], node.is_accepted)
                path.observe(node.path_acceptance, node.is_accepted)
                if node.parent < 0 or nodes[node.parent].is_accepted:
                    confidence = calibrator.confidence(log_prob, node.position)
                    own.observe(math.exp(log_prob), node.is_accepted)
                    token.observe(confidence, node.is_accepted)
                    place = min(int(confidence * 20), 19)
                    variances[place] = variances.get(place, 0.0) + confidence * (1 - confidence)
    # The mean distance of a normal variable is sqrt(2 / pi) of its deviation.
    floor = sum(math.sqrt(2 / math.pi * variance) for variance in variances.values()) / max(token.count, 1)
    return Errors(own.value, token.value, own_path.value, path.value, token.count, floor)
