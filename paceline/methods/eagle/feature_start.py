"""Where training of EAGLE-1 and EAGLE-2 starts: ``fc`` predicts the next feature as well as a linear map can.

Called by `feature_training.py`. Knows nothing of the loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.methods.eagle.feature_layer import BLOCK
from paceline.methods.eagle.feature_objective import Eagle1Shape
from paceline.training.data import Batch, Corpus, take_rows
from paceline.training.sizes import ModelSizes
from paceline.training.start import RIDGE, answer_transitions, random_parameters, solve_ridge


def default_shape(target: ModelSizes) -> Eagle1Shape:
    """One layer like the target's own."""
    return Eagle1Shape(**target.drafter_sizes())


@dataclass(frozen=True, slots=True)
class Eagle1Start:
    """A linear look-ahead from a token's embedding and the feature before it to the token's own feature.

    Attributes:
        weight: float32 ``[hidden, 2 * hidden]`` for ``[embedding ; feature]``.
        constant: float32 ``[hidden]``.
        level: root mean square of features.
    """

    weight: Tensor
    constant: Tensor
    level: float


def fit_next_feature(corpus: Corpus, embedding: Tensor, max_tokens: int) -> Eagle1Start:
    """Ridge regression over answers.

    Args:
        corpus: text with features.
        embedding: the target's ``[vocab, hidden]``.
        max_tokens: answer tokens to read.
    """
    tokens, before, after = take_rows(corpus, _samples, max_tokens)
    inputs = torch.cat([embedding[tokens].float(), before], dim=1)
    level = float(after.square().mean().sqrt())
    centre, wanted = inputs.mean(0), after.mean(0)
    inputs -= centre
    scale = inputs.square().mean(0).sqrt().clamp_min(1e-6)
    inputs /= scale
    solution = solve_ridge(inputs.T @ inputs, inputs.T @ (after - wanted), RIDGE * len(inputs)) / scale
    return Eagle1Start(solution, wanted - solution @ centre, level)


def _samples(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    hidden = batch.need_hidden()
    return answer_transitions(batch, hidden, hidden)


def starting_parameters(shape: Eagle1Shape, start: Eagle1Start, seed: int) -> dict[str, Tensor]:
    """Parameters that begin as the fitted linear drafter.

    ``fc`` is the fitted map; attention and MLP add little at first. Attention reads features without a norm before it,
    so its random matrices are divided by the features' scale.

    Args:
        shape: sizes.
        start: from :func:`fit_next_feature`.
        seed: of the random matrices.
    """
    parameters = random_parameters(shape.parameter_shapes(), seed, branch_scale=0.1)
    parameters["fc.weight"], parameters["fc.bias"] = start.weight, start.constant
    for x in "qkv":
        parameters[f"{BLOCK}self_attn.{x}_proj.weight"] /= start.level
    return parameters
