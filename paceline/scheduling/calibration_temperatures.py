"""Sequential temperature scaling: confidences whose products along a path are calibrated too.

Responsible for: the held-out paths of a round, and the temperature of each position (DSpark, arXiv 2607.05147,
section 4).

Deliberately does not know: how the logits were fitted, which rounds are held out.

Called by: `calibration.Calibrator`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.scheduling.acceptance_regression import (
    MAX_POSITIONS,
    NUM_KNOTS,
    FloatArray,
    knot_of,
    sigmoid,
)
from paceline.scheduling.reliability import NUM_BINS

_TEMPERATURES: FloatArray = np.exp(np.linspace(math.log(0.5), math.log(2.0), 21))
_TEMPERATURE_PULL = 0.2  # calibration error per unit of log-temperature, for 100 nodes; falls as nodes grow


class Node(NamedTuple):
    """A verified token.

    Attributes:
        parent: index of its parent among the round's nodes, smaller than its own; -1 for the committed text.
        log_prob: the drafter's log-probability, None where the drafter gave none.
        position: in the draft, from 0.
        path_acceptance: the product of confidences from the committed text down to this token, as it was used.
        is_accepted: whether the target accepted it, and with it all tokens before it.
    """

    parent: int
    log_prob: float | None
    position: int
    path_acceptance: float
    is_accepted: bool


class FreshPaths(NamedTuple):
    """Nodes of one round whose position in the draft equals their depth in the tree; `[nodes]` each.

    The nodes of a draft that arrived late hang deeper in the tree or start in the middle of the draft. What
    came before their first node is unknown, so they are left out.
    """

    parents: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    knots: FloatArray  # positions among the knots, see `knot_of`
    accepted: FloatArray


def fresh_paths(nodes: Sequence[Node]) -> FreshPaths:
    """The nodes of one round that qualify (see `FreshPaths`)."""
    parents: list[int] = []
    positions: list[int] = []
    knots: list[float] = []
    accepted: list[bool] = []
    kept: dict[int, int] = {}
    for index, node in enumerate(nodes):
        above = -1 if node.parent < 0 else kept.get(node.parent, -2)
        depth = 0 if above < 0 else positions[above] + 1
        if node.log_prob is None or above == -2 or node.position != depth or depth >= MAX_POSITIONS:
            continue
        kept[index] = len(parents)
        parents.append(above)
        positions.append(depth)
        knots.append(knot_of(node.log_prob))
        accepted.append(node.is_accepted)
    return FreshPaths(
        np.asarray(parents, dtype=np.int64),
        np.asarray(positions, dtype=np.int64),
        np.asarray(knots, dtype=np.float64),
        np.asarray(accepted, dtype=np.float64),
    )


def fit_temperatures(rounds: Sequence[FreshPaths], logits: FloatArray) -> FloatArray:
    """`[positions]`: sequential temperature scaling over held-out rounds.

    Position after position, T_k minimises the expected calibration error of the product of sigmoid(logit_i /
    T_i) along the path, i <= k, with the earlier temperatures fixed. A pull towards 1 decides while nodes are
    few.

    Args:
        rounds: held-out rounds.
        logits: `[positions, knots]`, as the regression fitted them.
    """
    temperatures = np.ones(MAX_POSITIONS)
    position = np.concatenate([paths.positions for paths in rounds])
    if not len(position):
        return temperatures
    offsets = np.cumsum([0, *(len(paths.parents) for paths in rounds)])
    parent = np.concatenate(
        [
            np.where(paths.parents < 0, -1, paths.parents + offset)
            for paths, offset in zip(rounds, offsets[:-1], strict=True)
        ]
    )
    knot = np.concatenate([paths.knots for paths in rounds])
    came = np.concatenate([paths.accepted for paths in rounds])
    low = np.minimum(knot.astype(np.int64), NUM_KNOTS - 2)
    part = knot - low
    logit = logits[position, low] * (1 - part) + logits[position, low + 1] * part  # [nodes]
    path_acceptance = np.ones(len(parent) + 1)  # parent -1, the committed text, finds the last element
    for depth in range(int(position.max()) + 1):
        here = np.flatnonzero(position == depth)
        above = path_acceptance[parent[here]]
        candidates = above * sigmoid(logit[here] / _TEMPERATURES[:, None])  # [temperatures, nodes here]
        bins = np.minimum((candidates * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        flat = (bins + NUM_BINS * np.arange(len(_TEMPERATURES))[:, None]).ravel()
        gaps = np.bincount(
            flat, weights=(candidates - came[here]).ravel(), minlength=NUM_BINS * len(_TEMPERATURES)
        )
        errors = np.abs(gaps).reshape(len(_TEMPERATURES), NUM_BINS).sum(axis=1) / len(here)
        pull = _TEMPERATURE_PULL * np.abs(np.log(_TEMPERATURES)) * math.sqrt(100.0 / len(here))
        chosen = int(np.argmin(errors + pull))
        temperatures[depth] = _TEMPERATURES[chosen]
        path_acceptance[here] = candidates[chosen]
    return temperatures
