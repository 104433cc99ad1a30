"""How DSpark is trained: the options of its block and of its heads, and its objective at random weights."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.methods.block_diffusion.start import random_parameters
from paceline.methods.block_diffusion.training import BlockOptions, block_parts
from paceline.methods.dspark.heads import MARKOV_IN, HeadPlan, MarkovHead
from paceline.methods.dspark.objective import DSparkObjective, LossWeights
from paceline.training.inputs import TrainingInputs
from paceline.training.options import option
from paceline.training.recipe import Recipe


@dataclass(frozen=True, slots=True)
class DSparkOptions(BlockOptions):
    """Options of DSpark, beside those of its block.

    Attributes:
        markov_head: vanilla, gated or rnn.
        markov_rank: rank of the Markov head's bias.
        token_share: weight of the cross entropy against the text.
        distance_share: weight of the distance from the target's probabilities.
        confidence_share: weight of the confidence head's error.
    """

    markov_head: str = option("vanilla", choices=("vanilla", "gated", "rnn"))
    markov_rank: int = option(256, minimum=1)
    token_share: float = option(0.1, minimum=0)
    distance_share: float = option(0.9, minimum=0)
    confidence_share: float = option(1.0, minimum=0)


def _build(options: DSparkOptions, inputs: TrainingInputs) -> DSparkObjective:
    parts = block_parts(options, inputs, published="anchor_first")
    shape = parts.shape
    heads = HeadPlan(MarkovHead(options.markov_head), options.markov_rank)
    shapes = shape.parameter_shapes()
    shapes |= heads.parameter_shapes(shape.hidden, shape.target_vocab, shape.draft_vocab)
    return DSparkObjective(
        shape,
        heads,
        random_parameters(shapes, inputs.seed, small=(MARKOV_IN,)),
        parts.embedding,
        parts.head,
        parts.draft_ids,
        parts.tap_scale,
        parts.target,
        num_anchors=options.num_anchors,
        decay=options.block_decay,
        loss_weights=LossWeights(options.token_share, options.distance_share, options.confidence_share),
        dtype=inputs.dtype,
    )


RECIPE = Recipe(DSparkOptions, _build, head_prefixes=("lm_head", "markov_head.markov_w"))
