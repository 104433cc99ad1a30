"""Shards of target-written text on disk: one safetensors file each, with its counts, and a manifest of the folder.

Knows the file format only. Called by the writers (:mod:`paceline.training.text_folder`) and by the reader
(:mod:`paceline.training.data`).

A shard holds flat arrays over all its tokens, and texts as offsets into them:

``tokens`` int32 ``[n]``; ``top_tokens`` int32 ``[n]`` the target's most likely next token after each position;
``segments`` uint8 ``[n]``; ``taps`` bfloat16 ``[n, n_taps * hidden]`` and ``hidden`` bfloat16 ``[n, hidden]`` (both
only when captured; the last position of a conversation has zeros); ``offsets`` int64 ``[conversations + 1]``;
``is_greedy`` uint8 ``[conversations]``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.atomic_write import replacing, write_json
from paceline.contract.errors import TrainingDataError

SEGMENT_TEMPLATE = 0
SEGMENT_USER = 1
SEGMENT_ANSWER = 2

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard in memory. Shapes and types as in the module's description."""

    tokens: Tensor
    top_tokens: Tensor
    segments: Tensor
    offsets: Tensor
    is_greedy: Tensor
    taps: Tensor | None
    hidden: Tensor | None

    @property
    def num_conversations(self) -> int:
        """Conversations in the shard."""
        return self.offsets.numel() - 1


def shard_path(folder: Path, index: int) -> Path:
    """The file of shard ``index``."""
    return folder / f"shard-{index:05d}.safetensors"


def shard_indices(folder: Path) -> list[int]:
    """Indices of the complete shards in a folder, ascending."""
    return sorted(int(p.stem.split("-")[1]) for p in folder.glob("shard-*.safetensors"))


def write_shard(path: Path, shard: Shard) -> None:
    """Writes a shard so that a reader sees either all of it or nothing."""
    arrays = {
        "tokens": shard.tokens,
        "top_tokens": shard.top_tokens,
        "segments": shard.segments,
        "offsets": shard.offsets,
        "is_greedy": shard.is_greedy,
    }
    if shard.taps is not None and shard.hidden is not None:
        arrays["taps"] = shard.taps
        arrays["hidden"] = shard.hidden
    with replacing(path) as part:
        save_file({k: v.contiguous() for k, v in arrays.items()}, part)


def read_shard(path: Path, with_features: bool = True) -> Shard:
    """Reads and checks one shard.

    Raises:
        TrainingDataError: the file is damaged or its arrays disagree.
    """
    try:
        with safe_open(path, framework="pt") as handle:
            names = set(handle.keys())
            get = lambda name: handle.get_tensor(name) if name in names else None  # noqa: E731
            tokens, top, segments = get("tokens"), get("top_tokens"), get("segments")
            offsets, greedy = get("offsets"), get("is_greedy")
            taps = get("taps") if with_features else None
            hidden = get("hidden") if with_features else None
    except (SafetensorError, OSError) as error:
        raise TrainingDataError(f"{path}: {error}") from error
    if tokens is None or top is None or segments is None or offsets is None or greedy is None:
        raise TrainingDataError(f"{path}: an array is missing")
    n = tokens.numel()
    bounds_ok = offsets.numel() >= 1 and int(offsets[0]) == 0 and int(offsets[-1]) == n
    if top.numel() != n or segments.numel() != n or not bounds_ok or bool((offsets.diff() < 0).any()):
        raise TrainingDataError(f"{path}: arrays disagree in length")
    if greedy.numel() != offsets.numel() - 1 or any(
        x is not None and x.shape[0] != n for x in (taps, hidden)
    ):
        raise TrainingDataError(f"{path}: arrays disagree in length")
    return Shard(tokens, top, segments, offsets, greedy, taps, hidden)


def has_features(path: Path) -> bool:
    """Whether a shard holds taps and hidden states; does not read them.

    Raises:
        TrainingDataError: the file is damaged.
    """
    try:
        with safe_open(path, framework="pt") as handle:
            return {"taps", "hidden"} <= set(handle.keys())
    except (SafetensorError, OSError) as error:
        raise TrainingDataError(f"{path}: {error}") from error


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Replaces the folder's manifest."""
    write_json(folder / MANIFEST, manifest, sort_keys=True)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The folder's manifest.

    Raises:
        TrainingDataError: absent or not JSON.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise TrainingDataError(f"{path}: {error}") from error
    if not isinstance(manifest, dict):
        raise TrainingDataError(f"{path}: not an object")
    return manifest


def write_counts(path: Path, shard: Shard) -> None:
    """Writes a shard's counts beside it.

    Args:
        path: of the shard.
        shard: what is in it.
    """
    counts = {
        "conversations": shard.num_conversations,
        "tokens": shard.tokens.numel(),
        "answer_tokens": int((shard.segments == SEGMENT_ANSWER).sum()),
        "greedy": int(shard.is_greedy.sum()),
    }
    write_json(path.with_suffix(".json"), counts, indent=None)


def folder_counts(folder: Path) -> dict[str, int]:
    """Sums of the counts beside a folder's shards: ``shards``, ``conversations``, ``tokens``, ``answer_tokens``."""
    totals = {"shards": 0, "conversations": 0, "tokens": 0, "answer_tokens": 0}
    for path in sorted(folder.glob("shard-*.json")):
        counts = json.loads(path.read_text())
        totals["shards"] += 1
        for key in ("conversations", "tokens", "answer_tokens"):
            totals[key] += int(counts[key])
    return totals
