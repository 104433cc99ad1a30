"""How an independent drafter is trained: its options, and its objective at a model cut from the target."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.methods.independent.objective import IndependentObjective
from paceline.training.inputs import TrainingInputs
from paceline.training.options import option
from paceline.training.recipe import Recipe
from paceline.training.sizes import ModelSizes


@dataclass(frozen=True, slots=True)
class IndependentOptions:
    """Options of an independent drafter.

    Attributes:
        draft_vocab: tokens that the drafter proposes: the most frequent of the text's answers; 0 for all.
        num_layers: layers cut from the target, half from either end.
    """

    draft_vocab: int = option(7680, minimum=0)
    num_layers: int = option(4, minimum=1)


def _build(options: IndependentOptions, inputs: TrainingInputs) -> IndependentObjective:
    vocab = ModelSizes.read(inputs.model_dir).vocab
    return IndependentObjective.cut_from_target(
        inputs.model_dir,
        options.num_layers,
        inputs.reference(max_positions=0),
        inputs.dtype,
        inputs.draft_ids_or_all(vocab, options.draft_vocab),
    )


RECIPE = Recipe(IndependentOptions, _build)
