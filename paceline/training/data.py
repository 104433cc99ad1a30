"""Batches of target-written text, in an order that a checkpoint can store.

Reads shards a few at a time and groups texts of similar length into batches. The order of batches depends on the seed,
the epoch and the epoch's list of shards alone. Knows no drafter. Called by the trainer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.contract.errors import TrainingDataError
from paceline.training import shards

_SHARDS_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Batch:
    """Right-padded conversations.

    Attributes:
        tokens: ``[rows, length]`` int64, zero-padded.
        top_tokens: ``[rows, length]`` int64, the target's most likely token *after* each position; -1 = padding.
        is_answer: ``[rows, length]`` bool, the token itself was chosen by the target as part of an answer.
        is_greedy: ``[rows]`` bool, the answer is the target's greedy one.
        lengths: ``[rows]`` int64.
        taps: ``[rows, length, n_taps * hidden]`` bfloat16, or None where a text has no features.
        hidden: ``[rows, length, hidden]`` bfloat16, after the target's final norm, or None.
        bare_shard: the file of a text without features, or None.
    """

    tokens: Tensor
    top_tokens: Tensor
    is_answer: Tensor
    is_greedy: Tensor
    lengths: Tensor
    taps: Tensor | None
    hidden: Tensor | None
    bare_shard: Path | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return int(self.lengths.sum())

    @property
    def is_greedy_answer(self) -> Tensor:
        """Tokens of greedy answers, bool ``[rows, length]``."""
        return self.is_answer & self.is_greedy[:, None]

    def need_taps(self) -> Tensor:
        """The taps; raises :class:`TrainingDataError` where a text has no features."""
        return self._needed(self.taps)

    def need_hidden(self) -> Tensor:
        """The hidden states; raises :class:`TrainingDataError` where a text has no features."""
        return self._needed(self.hidden)

    def _needed(self, features: Tensor | None) -> Tensor:
        if features is None:
            where = self.bare_shard or "the text"
            raise TrainingDataError(f"{where}: no features; add them with `paceline data features`")
        return features

    def part(self, rows: slice, length: int | None = None) -> Batch:
        """Some of the texts, as views, cut to ``length``, which none of them exceeds."""
        return Batch(
            tokens=self.tokens[rows, :length],
            top_tokens=self.top_tokens[rows, :length],
            is_answer=self.is_answer[rows, :length],
            is_greedy=self.is_greedy[rows],
            lengths=self.lengths[rows],
            taps=None if self.taps is None else self.taps[rows, :length],
            hidden=None if self.hidden is None else self.hidden[rows, :length],
            bare_shard=self.bare_shard,
        )


@dataclass(slots=True)
class DataPosition:
    """A run's position in its data: all that a resumed run needs to continue with the next batch."""

    epoch: int = 0
    batch: int = 0
    shard_ids: list[int] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """A JSON object for a checkpoint."""
        return {"epoch": self.epoch, "batch": self.batch, "shard_ids": self.shard_ids}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> DataPosition:
        """Reads what :meth:`to_json` wrote."""
        return cls(int(value["epoch"]), int(value["batch"]), [int(x) for x in value["shard_ids"]])


class Corpus:
    """A folder of shards as an endless sequence of batches.

    Shards that appear during a run are read from the next epoch on.

    Args:
        folder: of shards.
        batch_tokens: most padded tokens of a batch; one text always fits.
        seed: order of shards, conversations and batches.
        greedy_only: leave out texts whose answers were sampled.
        with_features: read taps and hidden states too.
    """

    def __init__(
        self,
        folder: Path,
        batch_tokens: int,
        seed: int,
        greedy_only: bool = False,
        with_features: bool = True,
    ) -> None:
        if not shards.shard_indices(folder):
            raise TrainingDataError(
                f"{folder}: no shards; write some with `paceline data synth` or `paceline data continue`"
            )
        self.folder = folder
        self.manifest = shards.read_manifest(folder)
        self._batch_tokens = batch_tokens
        self._seed = seed
        self._greedy_only = greedy_only
        self._with_features = with_features

    def batches(self, position: DataPosition) -> Iterator[Batch]:
        """Yields batches from ``position`` on without end, and keeps ``position`` at the next batch."""
        while True:
            if not position.shard_ids:
                position.shard_ids = shards.shard_indices(self.folder)
            skip = position.batch
            for batch in self.epoch(position.epoch, position.shard_ids, skip):
                position.batch += 1
                yield batch
            position.epoch += 1
            position.batch = 0
            position.shard_ids = []

    def epoch(self, epoch: int, shard_ids: list[int], skip: int = 0) -> Iterator[Batch]:
        """One pass over ``shard_ids`` without its first ``skip`` batches."""
        order = random.Random(f"{self._seed}/{epoch}")
        ids = list(shard_ids)
        order.shuffle(ids)
        for start in range(0, len(ids), _SHARDS_AT_ONCE):
            paths = [shards.shard_path(self.folder, i) for i in ids[start : start + _SHARDS_AT_ONCE]]
            # Lengths come from small arrays; features are read only for a group that has a batch to yield.
            heads = [shards.read_shard(path, with_features=False) for path in paths]
            plan = self._plan(heads, order)
            if skip >= len(plan):
                skip -= len(plan)
                continue
            loaded = [shards.read_shard(path) for path in paths] if self._with_features else heads
            for members in plan[skip:]:
                yield _collate(loaded, paths, members)
            skip = 0

    def _plan(self, heads: list[shards.Shard], order: random.Random) -> list[list[tuple[int, int]]]:
        """Batches of (shard in group, conversation), similar lengths together, in random order."""
        items: list[tuple[int, int, int]] = []
        for i, shard in enumerate(heads):
            lengths = shard.offsets.diff().tolist()
            greedy = shard.is_greedy.tolist()
            items += [
                (n, i, j) for j, n in enumerate(lengths) if n > 2 and (greedy[j] or not self._greedy_only)
            ]
        order.shuffle(items)
        items.sort(key=lambda item: item[0])
        plan: list[list[tuple[int, int]]] = []
        for n, i, j in items:
            # Ascending lengths: the newest item is the longest of its batch.
            if not plan or (len(plan[-1]) + 1) * n > self._batch_tokens:
                plan.append([])
            plan[-1].append((i, j))
        order.shuffle(plan)
        return plan

    def count_answer_tokens(self, vocab: int, limit_shards: int = 64) -> Tensor:
        """How often each token occurs in answers, int64 ``[vocab]``."""
        counts = torch.zeros(vocab, dtype=torch.int64)
        for index in shards.shard_indices(self.folder)[:limit_shards]:
            shard = shards.read_shard(shards.shard_path(self.folder, index), with_features=False)
            chosen = shard.tokens[shard.segments == shards.SEGMENT_ANSWER].long()
            counts += torch.bincount(chosen, minlength=vocab)
        return counts


def _collate(group: list[shards.Shard], paths: list[Path], members: list[tuple[int, int]]) -> Batch:
    spans = [(i, *group[i].offsets[j : j + 2].tolist()) for i, j in members]
    lengths = [end - start for _, start, end in spans]
    rows, room = len(spans), max(lengths)

    def gather(name: str, fill: int, dtype: torch.dtype) -> Tensor:
        like = getattr(group[spans[0][0]], name)
        out = torch.full((rows, room, *like.shape[1:]), fill, dtype=dtype)
        for row, (i, start, end) in enumerate(spans):
            out[row, : end - start] = getattr(group[i], name)[start:end]
        return out

    # Some shards may have features and others not: `paceline data features` was stopped, or text was added since.
    bare = next((paths[i] for i, _ in members if group[i].taps is None or group[i].hidden is None), None)
    segments = gather("segments", shards.SEGMENT_TEMPLATE, torch.uint8)
    return Batch(
        tokens=gather("tokens", 0, torch.int64),
        top_tokens=gather("top_tokens", -1, torch.int64),
        is_answer=segments == shards.SEGMENT_ANSWER,
        is_greedy=torch.tensor([bool(group[i].is_greedy[j]) for i, j in members]),
        lengths=torch.tensor(lengths),
        taps=None if bare else gather("taps", 0, torch.bfloat16),
        hidden=None if bare else gather("hidden", 0, torch.bfloat16),
        bare_shard=bare,
    )


def take_rows(
    corpus: Corpus, pick: Callable[[Batch], tuple[Tensor, ...]], max_rows: int
) -> tuple[Tensor, ...]:
    """Rows to fit a start on: ``pick`` takes them from one batch after another, until there are enough.

    Args:
        corpus: text.
        pick: from a batch to tensors with equally many rows.
        max_rows: stop reading batches at this many rows.

    Raises:
        TrainingDataError: there are none.
    """
    taken: list[tuple[Tensor, ...]] = []
    seen = 0
    for batch in corpus.epoch(0, shards.shard_indices(corpus.folder)[:4]):
        taken.append(pick(batch))
        seen += taken[-1][0].shape[0]
        if seen >= max_rows:
            break
    if seen == 0:
        raise TrainingDataError(f"{corpus.folder}: no answers to fit the start on")
    return tuple(torch.cat(parts) for parts in zip(*taken, strict=True))
