"""Options that both PARDs share, and the model that training starts from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from torch import Tensor

from paceline.contract.errors import TrainingDataError
from paceline.methods.pard.mask_token import mask_token_for
from paceline.methods.whole_model.cut_model import cut_model
from paceline.training.configuration import read_config_json
from paceline.training.inputs import TrainingInputs
from paceline.training.objective import TargetReference
from paceline.training.options import option
from paceline.training.sizes import ModelSizes, default_tap_layers
from paceline.training.target_weights import EMBEDDING, check_target_tensors, read_weights

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class PardOptions:
    """Options of PARD.

    Attributes:
        start_dir: a small model of the target's tokenizer to start from, instead of layers cut from the target.
        draft_vocab: tokens that the drafter proposes: the most frequent of the text's answers; 0 for all.
        num_layers: layers cut from the target, half from either end.
        num_depths: tokens drafted in one pass.
        keep_ratio: rows trained at a depth over those of the depth before.
        keep_floor: least fraction of rows at any depth.
    """

    start_dir: Path | None = None
    draft_vocab: int = option(7680, minimum=0)
    num_layers: int = option(4, minimum=1)
    num_depths: int = option(8, minimum=1)
    keep_ratio: float = option(0.7, above=0, maximum=1)
    keep_floor: float = option(0.2, minimum=0, maximum=1)


@dataclass(frozen=True, slots=True)
class PardParts:
    """What both PARD objectives are built from.

    Attributes:
        config: the model's `config.json`.
        weights: its tensors.
        target: what an exported checkpoint says of its target.
        settings: the arguments that both objectives share.
    """

    config: dict[str, Any]
    weights: dict[str, Tensor]
    target: TargetReference
    settings: dict[str, Any]


def pard_parts(options: PardOptions, inputs: TrainingInputs) -> PardParts:
    """The model that the options describe.

    Raises:
        TrainingDataError: `start_dir` has another vocabulary than the target.
    """
    target = ModelSizes.read(inputs.model_dir)
    if options.start_dir is None:
        config, weights = cut_model(inputs.model_dir, options.num_layers)
    else:
        config = read_config_json(options.start_dir)
        check_target_tensors(options.start_dir)
        weights = read_weights(options.start_dir)
    if (vocab := ModelSizes.from_config(config).vocab) != target.vocab:
        raise TrainingDataError(
            f"start_dir has {vocab} tokens and the target {target.vocab}: they must share a tokenizer"
        )
    counts = inputs.corpus.count_answer_tokens(target.vocab)
    mask = mask_token_for(inputs.model_dir, counts, weights[EMBEDDING])
    log.info("pard", mask_token=mask)
    settings = {
        "mask_token": mask,
        "draft_ids": inputs.draft_ids(target.vocab, options.draft_vocab) if options.draft_vocab else None,
        "num_depths": options.num_depths,
        "keep_ratio": options.keep_ratio,
        "keep_floor": options.keep_floor,
        "dtype": inputs.dtype,
        "tokenizer_dir": inputs.model_dir,
    }
    taps = default_tap_layers(target.num_layers)
    return PardParts(config, weights, inputs.reference(target.max_positions, taps), settings)
