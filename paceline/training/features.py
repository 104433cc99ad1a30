"""The target's features beside text that was written without them.

Responsible for running the serving engine over the texts of a folder's shards, and for writing the shards anew with
what drafters learn from. Whole texts are a step, which takes a fraction of the time that writing them took.
Deliberately knows no drafter. Called by ``paceline data features``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import structlog
import torch
from torch import Tensor

from paceline.contract.errors import TrainingDataError
from paceline.models import model_fingerprint
from paceline.target import TapSpec, TargetEngine
from paceline.training import shards
from paceline.training.sizes import ModelSizes, default_tap_layers
from paceline.training.synth import folder_counts
from paceline.training.target_rows import run_texts
from paceline.training.target_weights import check_target_tensors

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class FeatureOptions:
    """Options of :func:`run`.

    Attributes:
        model_dir: the target that wrote the text.
        data_dir: folder of the shards; those that have features are kept as they are.
        batch_tokens: tokens of a step; a longer text is a step of its own.
        dtype: compute type, ``bfloat16`` or ``float32``.
        num_threads: torch threads, 0 = leave as they are.
    """

    model_dir: Path
    data_dir: Path
    batch_tokens: int = 2048
    dtype: str = "bfloat16"
    num_threads: int = 0

    def validate(self) -> None:
        """Raises :class:`TrainingDataError` naming the first field out of range."""
        if self.batch_tokens < 1:
            raise TrainingDataError("batch_tokens must be at least 1")
        if self.dtype not in ("bfloat16", "float32"):
            raise TrainingDataError("dtype must be bfloat16 or float32")


def run(options: FeatureOptions) -> dict[str, int]:
    """Adds features to the shards that have none.

    Returns:
        Counts over the whole folder: ``shards``, ``conversations`` (texts), ``tokens``, ``answer_tokens``.

    Raises:
        TrainingDataError: no shards, text that another target wrote, or a target that no drafter is trained for.
    """
    options.validate()
    if options.num_threads:
        torch.set_num_threads(options.num_threads)
    indices = shards.shard_indices(options.data_dir)
    if not indices:
        raise TrainingDataError(f"{options.data_dir}: no shards; write some with `paceline data continue`")
    manifest = shards.read_manifest(options.data_dir)
    if manifest.get("model_fingerprint") != model_fingerprint(options.model_dir):
        raise TrainingDataError(
            f"{options.data_dir} was written by another target than {options.model_dir.name!r}"
        )
    engine: TargetEngine | None = None
    for index in indices:
        path = shards.shard_path(options.data_dir, index)
        if shards.has_features(path):
            continue
        shard = shards.read_shard(path)
        engine = engine or _load(options)
        started = time.monotonic()
        shards.write_shard(path, with_features(engine, shard, options.batch_tokens))
        seconds, n = time.monotonic() - started, shard.tokens.numel()
        log.info(
            "features_added", shard=index, tokens=n, seconds=round(seconds, 1), rate=round(n / seconds, 1)
        )
    return folder_counts(options.data_dir)


def _load(options: FeatureOptions) -> TargetEngine:
    # No objective could learn from what would be written for hours.
    check_target_tensors(options.model_dir)
    tap = TapSpec(layers=default_tap_layers(ModelSizes.read(options.model_dir).num_layers), norm_final=True)
    return TargetEngine.load(options.model_dir, dtype=getattr(torch, options.dtype), taps=[tap])


def with_features(engine: TargetEngine, shard: shards.Shard, batch_tokens: int) -> shards.Shard:
    """A shard with the engine's features of every position but each text's last, which has zeros.

    Args:
        engine: with one tap, of some layers and the final norm behind them.
        shard: text.
        batch_tokens: tokens of a step, at most; one text always fits.
    """
    hidden_size = engine.shape.hidden_size
    width = engine.taps[0].width(hidden_size)
    rows = torch.zeros(shard.tokens.numel(), width, dtype=torch.bfloat16)
    for spans in _batches(shard.offsets, batch_tokens):
        # The last token of a text was never run when it was written.
        texts = [shard.tokens[start : end - 1].tolist() for start, end in spans]
        for own, (start, end) in zip(run_texts(engine, texts), spans, strict=True):
            rows[start : end - 1] = own
    taps, hidden = rows[:, :-hidden_size], rows[:, -hidden_size:]
    return replace(shard, taps=taps, hidden=hidden)


def _batches(offsets: Tensor, batch_tokens: int) -> Iterator[list[tuple[int, int]]]:
    """Spans of texts that are run together, in order; one of a single token has nothing to run."""
    batch: list[tuple[int, int]] = []
    size = 0
    bounds = offsets.tolist()
    for start, end in pairwise(bounds):
        if end - start < 2:
            continue
        if batch and size + end - start > batch_tokens:
            yield batch
            batch, size = [], 0
        batch.append((start, end))
        size += end - start
    if batch:
        yield batch
