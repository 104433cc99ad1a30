"""Where multi-token prediction starts for a finished target: modules that predict as well as a linear map can.

Called by the method's `recipe.py`. Knows nothing of the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.contract.errors import TrainingDataError
from paceline.methods.checkpoint import CheckpointError
from paceline.methods.deepseek_mtp.deepseek_block import read_latent, read_mlp
from paceline.methods.deepseek_mtp.layer import module_prefix
from paceline.methods.deepseek_mtp.objective import MtpShape
from paceline.methods.layouts.public_config import PublicConfig
from paceline.model.experts import ExpertsShape
from paceline.model.latent import LatentShape
from paceline.training.configuration import parse_configuration
from paceline.training.data import Batch, Corpus, take_rows
from paceline.training.sizes import ModelSizes
from paceline.training.start import RIDGE, answer_transitions, random_parameters, solve_ridge

_UNEVEN = 3.0  # inputs of the final norm are not fitted if they are this many times as uneven as its outputs


def default_shape(target: ModelSizes, num_modules: int, config: Mapping[str, Any] | None = None) -> MtpShape:
    """Blocks like the target's own.

    Modules hand on a normed state. The first module reads the target's state after the final norm; so all modules, and
    one that is run on its own output, read the same kind of state.

    Args:
        target: sizes.
        num_modules: modules in sequence.
        config: the target's ``config.json``. From it DeepSeek-V3's modules get latent attention and experts; without it
            blocks are those of the Llama family.

    Raises:
        TrainingDataError: the target is a DeepSeek-V3 with a block that no module has.
    """
    sizes: dict[str, Any] = target.drafter_sizes()
    if config is not None and config.get("model_type") == "deepseek_v3":
        public = PublicConfig(
            parse_configuration(config).to_dict()
        )  # with transformers' defaults, as the target runs
        try:
            own = read_mlp(public, target.num_layers, num_modules) | read_latent(public)
        except CheckpointError as error:
            raise TrainingDataError(f"a module like the target's layers: {error}") from error
        sizes |= own | {"latent": LatentShape(**own["latent"])}
        if "experts" in own:
            sizes["experts"] = ExpertsShape(**own["experts"])
    return MtpShape(**sizes, target_layers=target.num_layers, num_modules=num_modules, carries_norm=True)


@dataclass(frozen=True, slots=True)
class MtpStart:
    """A linear look-ahead to the direction of the next state, and the norm that gives it its length.

    Attributes:
        projection: float32 ``[hidden, 2 * hidden]``, for ``[embedding ; feature]`` normed without weights.
        norm: float32 ``[hidden]``, weight of the norm after it.
    """

    projection: Tensor
    norm: Tensor


def fit_projection(
    corpus: Corpus, embedding: Tensor, final_norm: Tensor, eps: float, max_tokens: int
) -> MtpStart:
    """Ridge regression to the next state as it enters the final norm.

    In some models, such as Gemma, single entries of that state are far larger than the rest. Random layers at the start
    and an optimiser's equal steps for all entries would drown the entries that the norm's weights then enlarge. For
    such models the map leads to the state after the norm, whose entries are more even, with a constant as the norm's
    weights.

    Args:
        corpus: text with features.
        embedding: the target's ``[vocab, hidden]``.
        final_norm: the target's ``[hidden]``.
        eps: of its norms.
        max_tokens: answer tokens to read.
    """
    tokens, before, after = take_rows(corpus, _samples, max_tokens)
    width = before.shape[1:]
    rows = [F.rms_norm(embedding[tokens].float(), width, eps=eps), F.rms_norm(before, width, eps=eps)]
    inputs = torch.cat(rows, dim=1)
    safe = torch.where(final_norm.abs() < 1e-3, torch.ones_like(final_norm), final_norm).float()
    norm, wanted = final_norm.float(), after / safe
    if _unevenness(wanted) > _UNEVEN * _unevenness(after):
        level = after.square().mean().sqrt()
        norm, wanted = level.expand(width).clone(), after / level
    return MtpStart(solve_ridge(inputs.T @ inputs, inputs.T @ wanted, RIDGE * len(inputs)), norm)


def _unevenness(states: Tensor) -> float:
    """The largest mean square of an entry over that of all."""
    squares = states.square().mean(0)
    return float(squares.max() / squares.mean())


def _samples(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    hidden = batch.need_hidden()
    return answer_transitions(batch, hidden, hidden)


def starting_parameters(shape: MtpShape, start: MtpStart, seed: int) -> dict[str, Tensor]:
    """Parameters that begin as the fitted map and the norm after it, in every module.

    Args:
        shape: sizes.
        start: from :func:`fit_projection`.
        seed: of the random matrices.
    """
    parameters = random_parameters(shape.parameter_shapes(), seed, branch_scale=0.1)
    for module in range(shape.num_modules):
        prefix = module_prefix(module)
        bias = prefix + "mlp.gate.e_score_correction_bias"
        if bias in parameters:  # no gradient reaches it: it chooses experts, and weighs nothing
            parameters[bias] = torch.zeros_like(parameters[bias])
        parameters[prefix + "eh_proj.weight"] = start.projection.clone()
        parameters[prefix + "shared_head.norm.weight"] = start.norm.clone()
    return parameters
