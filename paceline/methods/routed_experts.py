"""Routed experts in drafters' checkpoints: their sizes, and their tensors by DeepSeek-V3's names.

`shape.experts` of a checkpoint has the fields of :class:`paceline.model.experts.ExpertsShape`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields

import torch
from torch import Tensor

from paceline.methods.checkpoint import CheckpointError, DrafterConfig
from paceline.methods.shape_section import read_section
from paceline.model.experts import SCORINGS, ExpertsShape, ExpertsWeights
from paceline.model.projection import Projection

MAX_EXPERTS = 4096
"""More than any published model has; a larger number is a damaged file, whose tensors would fill memory with names."""


def experts_shape(config: DrafterConfig) -> ExpertsShape | None:
    """Sizes of a checkpoint's experts; None if it has none.

    Raises:
        CheckpointError: a field is missing, unknown, of another type, or does not fit the others.
    """
    content = read_section(config, "experts", fields(ExpertsShape))
    if content is None:
        return None
    shape = ExpertsShape(**content)

    def check(fits: bool, says: str) -> None:
        if not fits:
            raise CheckpointError(f"shape.experts: {says}")

    sizes = ("num_experts", "num_active", "intermediate", "num_groups", "num_active_groups")
    for name in sizes:
        check(getattr(shape, name) >= 1, f"{name} must be at least 1")
    check(shape.num_experts <= MAX_EXPERTS, f"num_experts must not exceed {MAX_EXPERTS}")
    check(math.isfinite(shape.scale), "scale must be a finite number")
    check(
        not shape.has_shared_gate or config.shape.get("intermediate") != 0,
        "has_shared_gate needs a shared expert, whose width is shape.intermediate",
    )
    check(shape.scoring in SCORINGS, f"scoring must be one of {', '.join(SCORINGS)}, not {shape.scoring!r}")
    check(shape.num_experts % shape.num_groups == 0, "num_groups must divide num_experts")
    in_group = shape.num_experts // shape.num_groups
    check(shape.num_groups == 1 or in_group >= 2, "a group must have at least 2 experts")
    check(shape.num_active_groups <= shape.num_groups, "num_active_groups must not exceed num_groups")
    check(
        shape.num_active <= shape.num_active_groups * in_group,
        "num_active must not exceed the experts of num_active_groups groups",
    )
    return shape


def experts_tensors(shape: ExpertsShape, hidden: int) -> dict[str, tuple[int, ...]]:
    """Tensors of the experts by name, without the MLP that every row passes."""
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (shape.num_experts, hidden)}
    if shape.has_correction_bias:
        shapes["mlp.gate.e_score_correction_bias"] = (shape.num_experts,)
    for expert in range(shape.num_experts):
        prefix = f"mlp.experts.{expert}."
        shapes[prefix + "gate_proj.weight"] = (shape.intermediate, hidden)
        shapes[prefix + "up_proj.weight"] = (shape.intermediate, hidden)
        shapes[prefix + "down_proj.weight"] = (hidden, shape.intermediate)
    if shape.has_shared_gate:
        shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
    return shapes


def read_experts(
    shape: ExpertsShape, tensors: Mapping[str, Tensor], prefix: str, dtype: torch.dtype
) -> ExpertsWeights:
    """The experts of a block.

    Args:
        shape: sizes.
        tensors: by the names of :func:`experts_tensors`.
        prefix: of the block's names.
        dtype: to compute the experts in.
    """

    def projection(name: str) -> Projection:
        return Projection(tensors[f"{prefix}mlp.{name}.weight"].to(dtype))

    experts = [f"experts.{index}." for index in range(shape.num_experts)]
    bias = tensors[f"{prefix}mlp.gate.e_score_correction_bias"] if shape.has_correction_bias else None
    return ExpertsWeights(
        gate=tensors[f"{prefix}mlp.gate.weight"].float(),
        correction_bias=None if bias is None else bias.float(),
        gate_up=tuple(
            Projection.join([projection(e + "gate_proj"), projection(e + "up_proj")]) for e in experts
        ),
        down=tuple(projection(e + "down_proj") for e in experts),
        shared_gate=projection("shared_expert_gate") if shape.has_shared_gate else None,
    )
