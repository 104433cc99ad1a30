"""Where EAGLE-3 training starts: sizes from the target, draft vocabulary by coverage, weights that already predict.

Called by :mod:`paceline.training.methods`. Knows nothing of the loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.training import shards
from paceline.training.data import Batch, Corpus
from paceline.training.eagle3 import Eagle3Shape
from paceline.training.errors import TrainingDataError
from paceline.training.teacher import TeacherShape

_RIDGE = 1e-3


def default_shape(
    target: TeacherShape, num_taps: int, draft_vocab: int, intermediate: int | None
) -> Eagle3Shape:
    """One layer of the target's own width."""
    return Eagle3Shape(
        hidden=target.hidden,
        target_hidden=target.hidden,
        num_taps=num_taps,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        intermediate=intermediate or target.intermediate,
        draft_vocab=draft_vocab,
        target_vocab=target.vocab,
        rope_theta=target.rope_theta,
        rms_eps=target.rms_eps,
    )


@dataclass(frozen=True, slots=True)
class LinearStart:
    """A linear look-ahead and the scales of what it reads and writes.

    Attributes:
        projection: float32 ``[hidden, taps_width]``, from taps to the final hidden state one position later.
        tap_scale: float32 ``[taps_width]``, root mean square per entry.
        hidden_scale: float32 ``[hidden]``, root mean square per entry of the final hidden state.
    """

    projection: Tensor
    tap_scale: Tensor
    hidden_scale: Tensor


def fit_linear(corpus: Corpus, max_tokens: int, taps_width: int, hidden: int) -> LinearStart:
    """Ridge regression from a position's taps to the target's final hidden state one position later.

    The layer then starts as a linear drafter that looks two tokens ahead, and training only has to improve on it.
    """
    gram = torch.zeros(taps_width, taps_width, dtype=torch.float64)
    cross = torch.zeros(taps_width, hidden, dtype=torch.float64)
    squares = torch.zeros(hidden, dtype=torch.float64)
    seen = 0
    for batch in corpus.epoch(0, shards.shard_indices(corpus.folder)[:4]):
        x, y = _pairs(batch)
        gram += (x.T @ x).double()
        cross += (x.T @ y).double()
        squares += y.square().sum(0).double()
        seen += x.shape[0]
        if seen >= max_tokens:
            break
    if seen == 0:
        raise TrainingDataError(f"{corpus.folder}: no answers to fit the projection on")
    tap_scale = (gram.diagonal() / seen).sqrt().clamp_min(1e-6)
    scaled = gram / tap_scale[:, None] / tap_scale[None]
    scaled += torch.eye(taps_width, dtype=torch.float64) * (_RIDGE * seen)
    solution = torch.linalg.solve(scaled, cross / tap_scale[:, None]) / tap_scale[:, None]
    hidden_scale = (squares / seen).sqrt().clamp_min(1e-6)
    return LinearStart(solution.T.float().contiguous(), tap_scale.float(), hidden_scale.float())


def _pairs(batch: Batch) -> tuple[Tensor, Tensor]:
    if batch.taps is None or batch.hidden is None:
        raise TrainingDataError("the shards hold no features; write them with features")
    keep = batch.is_answer[
        :, 1:
    ].clone()  # the position after the features' own is part of an answer, and was run
    keep &= torch.arange(1, batch.tokens.shape[1])[None] < (batch.lengths - 1)[:, None]
    return batch.taps[:, :-1][keep].float(), batch.hidden[:, 1:][keep].float()


def starting_parameters(shape: Eagle3Shape, start: LinearStart, target_head: Tensor, seed: int) -> dict[str, Tensor]:
    """Parameters that reproduce the fitted linear drafter: both residual branches end in small matrices.

    ``fc.weight`` is for taps divided by ``start.tap_scale``.

    Args:
        shape: sizes; ``hidden`` must equal ``target_hidden``.
        start: from :func:`fit_linear`.
        target_head: the target's head rows of the draft vocabulary.
        seed: of the random matrices.
    """
    if shape.hidden != shape.target_hidden:
        raise TrainingDataError("a draft layer narrower than its target cannot start from the target's head")
    random = torch.Generator().manual_seed(seed)
    parameters: dict[str, Tensor] = {}
    for name, size in shape.parameter_shapes().items():
        if len(size) == 1:
            parameters[name] = torch.ones(size)
        else:
            parameters[name] = torch.randn(size, generator=random) * size[1] ** -0.5
    for name in ("midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight"):
        parameters[name] *= 0.1
    # One scale for the whole stream: scaling each entry on its own made the head most sensitive where the target's
    # stream is a large constant, and training slower.
    level = start.hidden_scale.square().mean().sqrt()
    parameters["fc.weight"] = start.projection * start.tap_scale / level
    parameters["lm_head.weight"] = target_head.float() * level
    return parameters
