"""Routed experts: MLPs of which each row passes a few (DeepSeek-V3, 2412.19437, section 2.1.2).

The description of the experts, the choice of experts for a row, and the sum over them, in torch operators that autograd
can differentiate: inference and training share them. An expert itself is the caller's. The choice was compared with
transformers' routers of DeepSeek-V3, GLM-4 MoE and Qwen3 MoE.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.model.projection import Projection

SCORINGS = ("sigmoid", "softmax")


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """Sizes of the experts, and how rows are given to them.

    Attributes:
        num_experts: experts.
        num_active: experts of a row.
        intermediate: width of one expert.
        scoring: what the gate's products become: `sigmoid` each by itself, or `softmax` over all.
        num_groups: groups of equal size, neighbours in order; 1 does not group.
        num_active_groups: groups from which a row's experts are chosen: those whose best two scores sum to most.
        normalizes: divide the scores of a row's experts by their sum.
        scale: factor on the experts' sum.
        has_correction_bias: a bias on the scores that decides who is chosen and weighs nothing.
        has_shared_gate: the MLP that every row passes is multiplied by the sigmoid of a product (Qwen).
    """

    num_experts: int
    num_active: int
    intermediate: int
    scoring: str = "sigmoid"
    num_groups: int = 1
    num_active_groups: int = 1
    normalizes: bool = True
    scale: float = 1.0
    has_correction_bias: bool = True
    has_shared_gate: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsWeights:
    """The experts' weights.

    Attributes:
        gate: `[num_experts, hidden]` float32: the choice is computed in float32.
        correction_bias: `[num_experts]` float32, or None.
        gate_up: of each expert, `[2 * intermediate, hidden]`, gates first.
        down: of each expert, `[hidden, intermediate]`.
        shared_gate: `[1, hidden]`, or None.
    """

    gate: Tensor
    correction_bias: Tensor | None
    gate_up: tuple[Projection, ...]
    down: tuple[Projection, ...]
    shared_gate: Projection | None


def route(rows: Tensor, gate: Tensor, bias: Tensor | None, shape: ExpertsShape) -> tuple[Tensor, Tensor]:
    """Choose experts: their weights float32 and their indices int64, `[n, num_active]` each.

    Args:
        rows: `[n, hidden]`.
        gate: `[num_experts, hidden]`.
        bias: `[num_experts]`, or None.
        shape: of the experts.
    """
    products = F.linear(rows.float(), gate.float())
    scores = products.sigmoid() if shape.scoring == "sigmoid" else products.softmax(-1)
    choice = scores.detach() if bias is None else scores.detach() + bias.detach().float()
    if shape.num_groups > 1:
        by_group = choice.unflatten(-1, (shape.num_groups, -1))
        groups = by_group.topk(2, dim=-1).values.sum(-1).topk(shape.num_active_groups, dim=-1).indices
        closed = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter_(-1, groups, False)
        choice = by_group.masked_fill(closed[..., None], -torch.inf).flatten(-2)
    chosen = choice.topk(shape.num_active, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if shape.normalizes:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * shape.scale, chosen


def sum_experts(
    rows: Tensor, weights: Tensor, chosen: Tensor, run: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """The weighted sum of each row's experts, `[n, hidden]`.

    Args:
        rows: `[n, hidden]`.
        weights: see :func:`route`.
        chosen: see :func:`route`.
        run: an expert by its index, `[m, hidden] -> [m, hidden]`.
    """
    total = torch.zeros_like(rows)
    for expert in chosen.unique().tolist():
        row, place = (chosen == expert).nonzero(as_tuple=True)
        part = run(expert, rows[row]) * weights[row, place, None].to(rows.dtype)
        total = total.index_add(0, row, part)
    return total
