"""How Medusa-2 is trained: the options of its heads and of its target, and its objective over both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.methods.medusa2.objective import JointSettings, Medusa2Objective
from paceline.methods.medusa2.tuned_backbone import PREFIX, LoraSettings, TunedBackbone
from paceline.methods.medusa_heads.options import HeadOptions, starting_heads
from paceline.training.inputs import TrainingInputs
from paceline.training.options import option
from paceline.training.recipe import Recipe
from paceline.training.sizes import ModelSizes


@dataclass(frozen=True, slots=True)
class Medusa2Options(HeadOptions):
    """Options of Medusa-2, beside those of its heads.

    Attributes:
        heads_coefficient: weight of the heads beside the loss of their target.
        heads_schedule: of that weight over the joint stage: constant, linear or sine.
        heads_first: fraction of the run in which only the heads are trained.
        base_loss: loss of the target: kl to the original, or ce on the text.
        token_rows: rows of a batch whose target's loss is computed, chosen at random; 0 for all.
        max_loss_increase: held-out nats a token by which the tuned target may be worse.
        backbone_divisor: how many times smaller the learning rate of the target is.
        lora_rank: rank of the target's updates.
        lora_alpha: scale of the target's updates.
        lora_dropout: fraction of the updates' inputs that is left out.
    """

    heads_coefficient: float = option(0.2, above=0)
    heads_schedule: str = option("constant", choices=("constant", "linear", "sine"))
    heads_first: float = option(0.3, minimum=0, below=1)
    base_loss: str = option("kl", choices=("kl", "ce"))
    token_rows: int = option(0, minimum=0)
    max_loss_increase: float = 0.05
    backbone_divisor: float = option(4.0, above=0)
    lora_rank: int = option(32, minimum=1)
    lora_alpha: float = option(16.0, above=0)
    lora_dropout: float = option(0.05, minimum=0, below=1)


def _build(options: Medusa2Options, inputs: TrainingInputs) -> Medusa2Objective:
    settings = LoraSettings(options.lora_rank, options.lora_alpha, options.lora_dropout)
    backbone = TunedBackbone(inputs.model_dir, settings, inputs.seed, inputs.dtype)
    heads = starting_heads(options, inputs, ModelSizes.read(inputs.model_dir))
    joint = JointSettings(
        decay=options.step_decay,
        coefficient=options.heads_coefficient,
        schedule=options.heads_schedule,
        heads_first=options.heads_first,
        base_loss=options.base_loss,
        base_rows=options.token_rows,
        max_loss_increase=options.max_loss_increase,
    )
    return Medusa2Objective(heads, backbone, inputs.reference(backbone.shape.max_positions), joint)


def _rate_divisors(options: Medusa2Options) -> Mapping[str, float]:
    return {PREFIX: options.backbone_divisor}


RECIPE = Recipe(Medusa2Options, _build, rate_divisors=_rate_divisors)
