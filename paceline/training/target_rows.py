"""What a frozen target computes over whole texts, as a drafter's tap reads it.

Responsible for running the serving engine over texts. :class:`TargetRows` runs it over each batch again, for drafters
whose features are too wide to keep on disk; :mod:`paceline.training.features` stores the result. Knows no drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from paceline.target import SequenceRows, TapSpec, TargetEngine
from paceline.training.data import Batch


def run_texts(engine: TargetEngine, texts: Sequence[list[int]]) -> list[Tensor]:
    """Features ``[length, width]`` of each text. All run in one step, and nothing stays in the engine."""
    slots = [engine.open(len(text)) for text in texts]
    steps = [SequenceRows(slot, text, num_logits="none") for slot, text in zip(slots, texts, strict=True)]
    features = engine.step(steps).features
    for slot in slots:
        engine.close(slot)
    return features


class TargetRows:
    """A target with one tap.

    Args:
        model_dir: the target.
        tap: what to read.
        dtype: of the weights and of the features.
    """

    def __init__(self, model_dir: Path, tap: TapSpec, dtype: torch.dtype) -> None:
        self._engine = TargetEngine.load(model_dir, dtype=dtype, taps=[tap])

    def read(self, batch: Batch) -> Tensor:
        """Features of every position, ``[rows, length, width]``; zeros at padding."""
        lengths = [int(length) for length in batch.lengths]
        texts = [batch.tokens[row, :length].tolist() for row, length in enumerate(lengths)]
        features = run_texts(self._engine, texts)
        padded = features[0].new_zeros(len(lengths), batch.tokens.shape[1], features[0].shape[1])
        for row, (own, length) in enumerate(zip(features, lengths, strict=True)):
            padded[row, :length] = own
        return padded.clone()  # autograd cannot save a tensor of inference mode for the backward pass
