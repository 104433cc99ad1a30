"""What a frozen target computes over a batch of texts, as a drafter's tap reads it; computed anew for each batch.

For drafters whose features are too wide to keep on disk beside the text. Responsible for: running the serving engine
over right-padded batches. Deliberately does not know: any drafter. Called by objectives.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from paceline.target import SequenceRows, TapSpec, TargetEngine
from paceline.training.data import Batch


class TargetRows:
    """A target with one tap.

    Args:
        model_dir: the target.
        tap: what is read.
        dtype: of its weights and of what it gives.
    """

    def __init__(self, model_dir: Path, tap: TapSpec, dtype: torch.dtype) -> None:
        self._engine = TargetEngine.load(model_dir, dtype=dtype, taps=[tap])

    def read(self, batch: Batch) -> Tensor:
        """Features of every position, ``[rows, length, width]``; zeros where there is padding."""
        lengths = [int(length) for length in batch.lengths]
        slots = [self._engine.open(length) for length in lengths]
        steps = [
            SequenceRows(slot, batch.tokens[row, :length].tolist(), num_logits="none")
            for row, (slot, length) in enumerate(zip(slots, lengths, strict=True))
        ]
        features = self._engine.step(steps).features
        padded = features[0].new_zeros(len(lengths), batch.tokens.shape[1], features[0].shape[1])
        for row, (own, length) in enumerate(zip(features, lengths, strict=True)):
            padded[row, :length] = own
            self._engine.close(slots[row])
        return padded.clone()  # what inference mode made cannot be saved for a backward pass
