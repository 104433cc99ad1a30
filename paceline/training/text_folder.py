"""A folder of text that a target writes: options that every writer has, and the shards that are still missing.

A shard depends on the seed, its index and the target's weights alone. So several processes may write parts of one
folder, and a run that was stopped continues where it stopped. Called by the writers (`synth.py`, `continuations.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from paceline.models import model_fingerprint
from paceline.training import shards
from paceline.training.options import option

log = structlog.get_logger()

_OF_ONE_CALL = ("model_dir", "out_dir", "first_shard", "num_shards")
"""Options that the manifest leaves out: they differ between processes that write one folder."""


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Options of every writer.

    Attributes:
        model_dir: the target.
        out_dir: folder of the shards; existing shards are kept.
        seed: determines the text, together with the shard index.
        first_shard: index of the first shard to write.
        num_shards: shards to write; several processes may share a folder with disjoint ranges.
        rows: texts per shard, written together.
        max_tokens: most tokens of a text, its beginning included.
        greedy_fraction: fraction of texts whose answers are greedy.
        top_p: nucleus of sampled tokens.
        top_k: candidates before the nucleus.
        dtype: compute type, ``bfloat16`` or ``float32``.
        num_threads: torch threads, 0 = leave as they are.
    """

    model_dir: Path
    out_dir: Path
    seed: int = 1
    first_shard: int = 0
    num_shards: int = option(1, minimum=1)
    rows: int = option(32, minimum=1)
    max_tokens: int = option(192, minimum=3)
    greedy_fraction: float = option(0.5, minimum=0, maximum=1)
    top_p: float = option(0.95, above=0, maximum=1)
    top_k: int = option(64, minimum=1)
    dtype: str = option("bfloat16", choices=("bfloat16", "float32"))
    num_threads: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        """The compute type."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def generator(self, index: int) -> torch.Generator:
        """Random numbers of a shard."""
        return torch.Generator().manual_seed((self.seed << 20) + index)


def write_missing_shards(
    options: TextOptions, command: str, kind: str, write: Callable[[int], shards.Shard]
) -> dict[str, int]:
    """Writes the shards that are not there yet, each with its counts, and the manifest.

    Args:
        options: of the run.
        command: under ``paceline data``, that writes the folder.
        kind: of the folder, for its manifest.
        write: the shard of an index.

    Returns:
        Counts over the whole folder, as :func:`paceline.training.shards.folder_counts`.
    """
    options.out_dir.mkdir(parents=True, exist_ok=True)
    manifest = {
        "kind": kind,
        "model_fingerprint": model_fingerprint(options.model_dir),
        "command": (
            f"paceline data {command} {options.model_dir.name} {options.out_dir.name} --seed {options.seed} "
            f"--rows {options.rows} --max-tokens {options.max_tokens}"
        ),
        "settings": {k: v for k, v in asdict(options).items() if k not in _OF_ONE_CALL},
    }
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("shards", total=options.num_shards)
        for index in range(options.first_shard, options.first_shard + options.num_shards):
            path = shards.shard_path(options.out_dir, index)
            if not path.exists():
                started = time.monotonic()
                shard = write(index)
                shards.write_shard(path, shard)
                shards.write_counts(path, shard)
                counts = shards.folder_counts(options.out_dir)
                shards.write_manifest(options.out_dir, {**manifest, "counts": counts})
                seconds, n = time.monotonic() - started, shard.tokens.numel()
                log.info(
                    "shard_written",
                    shard=index,
                    tokens=n,
                    seconds=round(seconds, 1),
                    rate=round(n / seconds, 1),
                )
            progress.advance(task)
    return shards.folder_counts(options.out_dir)
