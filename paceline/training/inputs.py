"""What a method's objective is built from: a target, the text that the target wrote, and settings of the run.

Made by the trainer, read by the `recipe.py` of each method. Knows no method.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import structlog
import torch
from torch import Tensor

from paceline.contract.errors import TrainingDataError
from paceline.models import model_fingerprint
from paceline.training.data import Corpus
from paceline.training.draft_vocabulary import choose_draft_vocab
from paceline.training.objective import TargetReference

log = structlog.get_logger()

FIT_TOKENS = 40_000
"""Answer tokens that a linear start is fitted on."""


@dataclass(frozen=True, slots=True)
class TrainingInputs:
    """A target and its text.

    Attributes:
        model_dir: the target.
        fingerprint: of the target.
        corpus: text that the target wrote.
        seed: of starting weights.
        dtype: compute type; parameters stay float32.
    """

    model_dir: Path
    fingerprint: str
    corpus: Corpus
    seed: int
    dtype: torch.dtype

    @classmethod
    def of(cls, model_dir: Path, corpus: Corpus, seed: int, dtype: torch.dtype) -> TrainingInputs:
        """Inputs whose text was checked to be the target's own.

        Raises:
            TrainingDataError: another target wrote the text.
        """
        fingerprint = model_fingerprint(model_dir)
        if corpus.manifest.get("model_fingerprint") != fingerprint:
            raise TrainingDataError(f"{corpus.folder} was written by another target than {model_dir.name!r}")
        return cls(model_dir, fingerprint, corpus, seed, dtype)

    def reference(self, max_positions: int, tap_layers: tuple[int, ...] = ()) -> TargetReference:
        """What an exported checkpoint says of its target."""
        return TargetReference(self.fingerprint, self.model_dir.name, tap_layers, max_positions)

    def draft_ids(self, vocab: int, size: int) -> Tensor:
        """The `size` tokens that occur most often in the text's answers, ascending: int64 ``[size]``.

        Raises:
            TrainingDataError: the target has fewer tokens than `size`.
        """
        counts = self.corpus.count_answer_tokens(vocab)
        ids = choose_draft_vocab(counts, size)
        log.info("draft_vocab", size=size, coverage=round(float(counts[ids].sum() / counts.sum()), 4))
        return ids

    def draft_ids_or_all(self, vocab: int, size: int) -> Tensor | None:
        """As `draft_ids`; None where `size` is 0 or the whole vocabulary."""
        return None if size in (0, vocab) else self.draft_ids(vocab, size)
