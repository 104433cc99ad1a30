"""Where the training of DFlash and DSpark starts: random layers, and the scale of the features they read.

Called by the method's `recipe.py`. Knows nothing of the loss.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from paceline.training.data import Batch, Corpus, take_rows

_SCALE_TOKENS = 8192


def tap_scale(corpus: Corpus) -> Tensor:
    """Root mean square of every entry of the taps over some thousand answer tokens, float32 ``[taps_width]``."""
    (taken,) = take_rows(corpus, _answer_taps, _SCALE_TOKENS)
    return taken.square().mean(0).sqrt().clamp_min(1e-6)


def _answer_taps(batch: Batch) -> tuple[Tensor]:
    return (batch.need_taps()[batch.is_answer].float(),)


def random_parameters(
    shapes: Mapping[str, tuple[int, ...]], seed: int, small: Collection[str] = ()
) -> dict[str, Tensor]:
    """Random matrices, with branches that add little at first.

    Args:
        shapes: what is trained, by checkpoint name.
        seed: of the random numbers.
        small: matrices that start with entries of a standard deviation of 0.01.
    """
    random = torch.Generator().manual_seed(seed)
    parameters: dict[str, Tensor] = {}
    for name, size in shapes.items():
        if len(size) == 1:
            parameters[name] = torch.zeros(size) if name.endswith("bias") else torch.ones(size)
            continue
        parameters[name] = torch.randn(size, generator=random) * size[1] ** -0.5
        if "o_proj" in name or "down_proj" in name:
            parameters[name] *= 0.1
        if name in small:
            parameters[name] = torch.randn(size, generator=random) * 0.01
    return parameters
