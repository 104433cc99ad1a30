"""Cuts a trained drafter's vocabulary to the tokens that its target writes most.

Chooses those tokens, and cuts the rows of heads and the maps accordingly. Layers do not change, and neither does the
text: the target verifies. Called by `paceline checkpoints reduce`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from paceline.contract.errors import TrainingDataError
from paceline.methods.checkpoint import CheckpointError, DrafterConfig, read_all_tensors, save_drafter
from paceline.methods.registry import METHODS
from paceline.methods.target_vocabulary import TOKEN_MAP, check_token_map, read_draft_ids
from paceline.training.data import Corpus
from paceline.training.draft_vocabulary import choose_draft_vocab


@dataclass(frozen=True, slots=True)
class Reduction:
    """Result of a cut.

    Attributes:
        method: method of the drafter.
        num_before: tokens that the drafter proposed before.
        num_kept: tokens that it proposes now.
        num_counted: tokens of the counted text.
        num_covered: tokens of that text that it can propose.
    """

    method: str
    num_before: int
    num_kept: int
    num_counted: int
    num_covered: int

    @property
    def coverage(self) -> float:
        """Fraction of the counted text that the drafter can propose."""
        return self.num_covered / self.num_counted


def reduce_checkpoint(directory: Path, data_dir: Path, output: Path, size: int) -> Reduction:
    """Write a checkpoint that proposes only the `size` most frequent tokens of those that it proposes now.

    Args:
        directory: Paceline's checkpoint.
        data_dir: text that the target wrote; tokens of its answers are counted, as in training.
        output: directory to write, not the checkpoint's own.
        size: number of tokens to keep.

    Raises:
        CheckpointError: a method without such a vocabulary, one that proposes no more than `size` tokens already, or
            text of another target.
        TrainingDataError: there is no text.
    """
    config = DrafterConfig.read(directory)
    method = METHODS.get(config.method)
    if method is None or method.draft_map is None:
        known = ", ".join(sorted(each.name for each in METHODS.values() if each.draft_map is not None))
        raise CheckpointError(
            f"method {config.method!r} has no vocabulary to cut after training; those that do are {known}"
        )
    if output.resolve() == directory.resolve():
        raise CheckpointError("the output must be another directory than the checkpoint's own")
    corpus = Corpus(data_dir, batch_tokens=1, seed=0, with_features=False)
    if corpus.manifest.get("model_fingerprint") not in _writers(config):
        raise CheckpointError(
            f"{data_dir.name!r} was written by another target than the drafter was made for"
        )
    tensors, vocab = read_all_tensors(directory), config.size("target_vocab")
    ids = _draft_ids(method.draft_map, config, tensors)
    if not 0 < size < len(ids):
        raise CheckpointError(f"the drafter proposes {len(ids)} tokens: {size} cannot be kept of them")
    counts = corpus.count_answer_tokens(vocab)
    if not int(counts.sum()):
        raise TrainingDataError(f"{data_dir}: no answers to count")
    rows = choose_draft_vocab(counts[ids], size)  # [size], ascending
    kept = ids[rows]
    found = Reduction(config.method, len(ids), size, int(counts.sum()), int(counts[kept].sum()))
    training = {
        **config.training,
        "vocabulary": {"data": corpus.manifest.get("command"), "coverage": found.coverage},
    }
    save_drafter(
        output,
        replace(config, shape={**config.shape, "draft_vocab": size}, training=training),
        {**tensors, **_cut_rows(method.draft_rows, tensors, rows), **_maps(method.draft_map, kept, vocab)},
    )
    return found


def _writers(config: DrafterConfig) -> tuple[object, ...]:
    """Fingerprints of models whose text may be counted: the target, and the model that wrote the training text.

    They differ if the target was tuned together with the drafter.
    """
    data = config.training.get("data")
    return config.target_fingerprint, data.get("model_fingerprint") if isinstance(data, dict) else None


def _draft_ids(draft_map: str, config: DrafterConfig, tensors: dict[str, Tensor]) -> Tensor:
    """Target id of each token that the drafter proposes now, int64 `[draft_vocab]`."""
    everything = torch.arange(config.size("target_vocab"))
    if draft_map == "d2t":
        ids = read_draft_ids(config, tensors["d2t"], everything.device)
        return everything if ids is None else ids
    if TOKEN_MAP not in tensors:
        return everything
    return check_token_map(tensors[TOKEN_MAP], config.size("draft_vocab"), len(everything))


def _cut_rows(prefixes: tuple[str, ...], tensors: dict[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """Tensors with a row for each proposed token, cut to these rows."""
    return {name: tensor[rows].contiguous() for name, tensor in tensors.items() if name.startswith(prefixes)}


def _maps(draft_map: str, ids: Tensor, vocab: int) -> dict[str, Tensor]:
    if draft_map == TOKEN_MAP:
        return {TOKEN_MAP: ids}
    marks = torch.zeros(vocab, dtype=torch.bool)
    marks[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": marks}
