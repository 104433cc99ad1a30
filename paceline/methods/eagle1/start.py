"""Where EAGLE-1 training starts: a layer whose ``fc`` already predicts the next feature as well as a linear map can.

Called by the method's `recipe.py`. Knows nothing of the loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.methods.eagle1.objective import Eagle1Shape
from paceline.training.data import Batch, Corpus, take_rows
from paceline.training.sizes import ModelSizes

_RIDGE = 1e-3
_BRANCH_SCALE = 0.1  # of attention's and the gated product's first outputs


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
    """Ridge regression over answers, so that training begins at a drafter that already predicts.

    Args:
        corpus: text with features.
        embedding: the target's ``[vocab, hidden]``.
        max_tokens: answer tokens looked at.
    """
    tokens, before, after = take_rows(corpus, _samples, max_tokens)
    seen = tokens.shape[0]
    inputs = torch.cat([embedding[tokens].float(), before], dim=1)
    level = float(after.square().mean().sqrt())
    centre, wanted = inputs.mean(0), after.mean(0)
    inputs -= centre
    scale = inputs.square().mean(0).sqrt().clamp_min(1e-6)
    inputs /= scale
    gram = (inputs.T @ inputs).double()
    gram += torch.eye(gram.shape[0], dtype=torch.float64) * (_RIDGE * seen)
    solution = torch.linalg.solve(gram, (inputs.T @ (after - wanted)).double()).T.float() / scale
    return Eagle1Start(solution, wanted - solution @ centre, level)


def _samples(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """(token r + 1, feature of r, feature of r + 1) wherever token r + 1 is part of an answer and was run."""
    hidden = batch.need_hidden()
    keep = batch.is_answer[:, 1:].clone()
    keep &= torch.arange(1, batch.tokens.shape[1])[None] < (batch.lengths - 1)[:, None]
    return batch.tokens[:, 1:][keep], hidden[:, :-1][keep].float(), hidden[:, 1:][keep].float()


def starting_parameters(shape: Eagle1Shape, start: Eagle1Start, seed: int) -> dict[str, Tensor]:
    """Parameters that begin as the fitted linear drafter.

    ``fc`` is the fitted map, and what attention and the gated product add to it is small at first. What attention reads
    has the scale of features, for no norm comes before it; its random matrices divide by that.

    Args:
        shape: sizes.
        start: from :func:`fit_next_feature`.
        seed: of the random matrices.
    """
    random = torch.Generator().manual_seed(seed)
    parameters: dict[str, Tensor] = {}
    for name, size in shape.parameter_shapes().items():
        if len(size) == 1:
            parameters[name] = torch.ones(size)
        else:
            parameters[name] = torch.randn(size, generator=random) * size[1] ** -0.5
    parameters["fc.weight"], parameters["fc.bias"] = start.weight, start.constant
    for x in "qkv":
        parameters[f"layers.0.self_attn.{x}_proj.weight"] /= start.level
    for name in ("layers.0.self_attn.o_proj.weight", "layers.0.mlp.down_proj.weight"):
        parameters[name] *= _BRANCH_SCALE
    return parameters
