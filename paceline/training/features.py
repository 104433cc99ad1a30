"""``paceline data features``: the target's features for text that was written without them.

Responsible for running the serving engine over the texts of a folder's shards, and for writing the shards again with
what drafters learn from. A step runs whole texts, which takes a fraction of the time that writing the texts took. Knows
no drafter.
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
from paceline.training.options import check_options, option
from paceline.training.sizes import ModelSizes, default_tap_layers
from paceline.training.target_rows import run_texts
from paceline.training.target_weights import check_target_tensors

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class FeatureOptions:
    """Options of :func:`run`.

    Attributes:
        model_dir: the target that wrote the text.
        data_dir: folder of the shards; shards that have features stay as they are.
        batch_tokens: most tokens of a step; a longer text is a step of its own.
        dtype: compute type, ``bfloat16`` or ``float32``.
        num_threads: torch threads, 0 = leave as they are.
    """

    model_dir: Path
    data_dir: Path
    batch_tokens: int = option(2048, minimum=1)
    dtype: str = option("bfloat16", choices=("bfloat16", "float32"))
    num_threads: int = 0


def run(options: FeatureOptions) -> dict[str, int]:
    """Adds features to the shards that have none.

    Returns:
        Counts over the whole folder: ``shards``, ``conversations`` (texts), ``tokens``, ``answer_tokens``.

    Raises:
        TrainingDataError: there are no shards, another target wrote the text, or no drafter can learn from the target.
    """
    check_options(options)
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
    return shards.folder_counts(options.data_dir)


def _load(options: FeatureOptions) -> TargetEngine:
    # Checked first: no objective could learn from features that take hours to write.
    check_target_tensors(options.model_dir)
    tap = TapSpec(layers=default_tap_layers(ModelSizes.read(options.model_dir).num_layers), norm_final=True)
    return TargetEngine.load(options.model_dir, dtype=getattr(torch, options.dtype), taps=[tap])


def with_features(engine: TargetEngine, shard: shards.Shard, batch_tokens: int) -> shards.Shard:
    """The shard with the engine's features of every position; the last position of each text has zeros.

    Args:
        engine: with one tap, of some layers and then the final norm.
        shard: text.
        batch_tokens: most tokens of a step; one text always fits.
    """
    hidden_size = engine.shape.hidden_size
    width = engine.taps[0].width(hidden_size)
    rows = torch.zeros(shard.tokens.numel(), width, dtype=torch.bfloat16)
    for spans in _batches(shard.offsets, batch_tokens):
        # A writer never runs the last token of a text, so its features do not exist there either.
        texts = [shard.tokens[start : end - 1].tolist() for start, end in spans]
        for own, (start, end) in zip(run_texts(engine, texts), spans, strict=True):
            rows[start : end - 1] = own
    taps, hidden = rows[:, :-hidden_size], rows[:, -hidden_size:]
    return replace(shard, taps=taps, hidden=hidden)


def _batches(offsets: Tensor, batch_tokens: int) -> Iterator[list[tuple[int, int]]]:
    """Spans of texts that are run together, in order; a text of one token has nothing to run."""
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
