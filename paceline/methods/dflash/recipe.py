"""How DFlash is trained: its objective at random layers."""

from __future__ import annotations

from paceline.methods.block_diffusion.start import random_parameters
from paceline.methods.block_diffusion.training import BlockOptions, block_parts
from paceline.methods.dflash.objective import DFlashObjective
from paceline.training.inputs import TrainingInputs
from paceline.training.recipe import Recipe


def _build(options: BlockOptions, inputs: TrainingInputs) -> DFlashObjective:
    parts = block_parts(options, inputs, published="infilling")
    return DFlashObjective(
        parts.shape,
        random_parameters(parts.shape.parameter_shapes(), inputs.seed),
        parts.embedding,
        parts.head,
        parts.draft_ids,
        parts.tap_scale,
        parts.target,
        options.num_anchors,
        options.block_decay,
        inputs.dtype,
    )


RECIPE = Recipe(BlockOptions, _build)
