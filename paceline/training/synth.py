"""Text that the target writes itself: a user turn, given or written from the bare chat header, then the answer.

Responsible for sampling conversations in static batches and writing them, with the target's features, as shards.
Deliberately knows no drafter. Called by ``paceline data synth``.

Every row of a batch appends exactly one token a step, given (template, stem) or chosen (sampled, greedy), so all rows
share positions: no padding and no masks. A shard depends on (seed, shard index) and the weights alone.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from torch import Tensor

from paceline.atomic_write import write_json
from paceline.contract.errors import TrainingDataError
from paceline.models import model_fingerprint
from paceline.training import shards
from paceline.training.prompts import STEMS, draw_ask
from paceline.training.teacher import Teacher
from paceline.training.template import TurnTemplate

log = structlog.get_logger()

_LOOP_CHECK_STEPS = 16
_LOOP_WINDOW = 48
_LOOP_MAX_PERIOD = 24


@dataclass(frozen=True, slots=True)
class SynthOptions:
    """Options of :func:`run`.

    Attributes:
        model_dir: the target (transformers directory with safetensors, tokenizer and chat template).
        out_dir: folder of the shards; existing shards are kept.
        seed: names the text together with the shard index.
        first_shard: index of the first shard to write.
        num_shards: shards to write; several processes may share a folder with disjoint ranges.
        rows: conversations per shard, written as one batch.
        max_tokens: tokens per conversation at most, template included.
        max_user_tokens: the user turn is closed after this many.
        ask_fraction: share of user turns that are given whole, a task put to a topic.
        stem_fraction: share of the others that begin with a given stem.
        greedy_fraction: share of conversations answered greedily.
        answer_temperature: temperature of the other answers.
        user_temperature: temperature of user turns.
        top_p: nucleus of both.
        top_k: candidates looked at before the nucleus.
        features: store what feature-reading drafters learn from.
        dtype: compute type, ``bfloat16`` or ``float32``.
        num_threads: torch threads, 0 = leave as they are.
    """

    model_dir: Path
    out_dir: Path
    seed: int = 1
    first_shard: int = 0
    num_shards: int = 1
    rows: int = 128
    max_tokens: int = 320
    max_user_tokens: int = 96
    ask_fraction: float = 0.5
    stem_fraction: float = 0.6
    greedy_fraction: float = 0.6
    answer_temperature: float = 0.7
    user_temperature: float = 1.0
    top_p: float = 0.95
    top_k: int = 64
    features: bool = True
    dtype: str = "bfloat16"
    num_threads: int = 0

    def validate(self) -> None:
        """Raises :class:`TrainingDataError` naming the first field out of range."""
        for name in ("num_shards", "rows", "max_tokens", "max_user_tokens", "top_k"):
            if getattr(self, name) < 1:
                raise TrainingDataError(f"{name} must be at least 1")
        for name in ("ask_fraction", "stem_fraction", "greedy_fraction", "top_p"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise TrainingDataError(f"{name} must lie in [0, 1]")
        for name in ("answer_temperature", "user_temperature"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise TrainingDataError(f"{name} must be positive")
        if self.dtype not in ("bfloat16", "float32"):
            raise TrainingDataError("dtype must be bfloat16 or float32")


def run(options: SynthOptions) -> dict[str, int]:
    """Writes the shards that are not there yet.

    Returns:
        Counts over the whole folder: ``shards``, ``conversations``, ``tokens``, ``answer_tokens``.
    """
    options.validate()
    if options.num_threads:
        torch.set_num_threads(options.num_threads)
    options.out_dir.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(options.model_dir / "tokenizer.json"))
    template = TurnTemplate.load(options.model_dir, tokenizer)
    if len(template.header) + options.max_user_tokens + len(template.switch) >= options.max_tokens:
        raise TrainingDataError("max_tokens leaves no room for an answer")
    teacher = Teacher.load(options.model_dir, getattr(torch, options.dtype))
    fingerprint = model_fingerprint(options.model_dir)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("shards", total=options.num_shards)
        for index in range(options.first_shard, options.first_shard + options.num_shards):
            path = shards.shard_path(options.out_dir, index)
            if not path.exists():
                started = time.monotonic()
                with torch.inference_mode():
                    shard = ShardWriter(teacher, template, tokenizer, options, index).write()
                shards.write_shard(path, shard)
                _update_manifest(options, fingerprint, index, shard)
                seconds = time.monotonic() - started
                n = shard.tokens.numel()
                log.info(
                    "shard_written",
                    shard=index,
                    tokens=n,
                    seconds=round(seconds, 1),
                    rate=round(n / seconds, 1),
                )
            progress.advance(task)
    return folder_counts(options.out_dir)


def folder_counts(folder: Path) -> dict[str, int]:
    """Sums the counts that shards left beside themselves."""
    totals = {"shards": 0, "conversations": 0, "tokens": 0, "answer_tokens": 0}
    for path in sorted(folder.glob("shard-*.json")):
        counts = json.loads(path.read_text())
        totals["shards"] += 1
        for key in ("conversations", "tokens", "answer_tokens"):
            totals[key] += int(counts[key])
    return totals


def write_counts(path: Path, shard: shards.Shard) -> None:
    """Leaves a shard's counts beside it.

    Args:
        path: of the shard.
        shard: what is in it.
    """
    counts = {
        "conversations": shard.num_conversations,
        "tokens": shard.tokens.numel(),
        "answer_tokens": int((shard.segments == shards.SEGMENT_ANSWER).sum()),
        "greedy": int(shard.is_greedy.sum()),
    }
    write_json(path.with_suffix(".json"), counts, indent=None)


def _update_manifest(options: SynthOptions, fingerprint: str, index: int, shard: shards.Shard) -> None:
    write_counts(shards.shard_path(options.out_dir, index), shard)
    settings = {
        k: v
        for k, v in asdict(options).items()
        if k not in ("model_dir", "out_dir", "first_shard", "num_shards")
    }
    command = (
        f"paceline data synth {options.model_dir.name} {options.out_dir.name} --seed {options.seed} "
        f"--rows {options.rows} --max-tokens {options.max_tokens}"
    )
    shards.write_manifest(
        options.out_dir,
        {
            "kind": "paceline-synth",
            "model_fingerprint": fingerprint,
            "command": command,
            "settings": settings,
            "counts": folder_counts(options.out_dir),
        },
    )


class ShardWriter:
    """One static batch from the bare header to the last closed answer."""

    def __init__(
        self,
        teacher: Teacher,
        template: TurnTemplate,
        tokenizer: Tokenizer,
        options: SynthOptions,
        index: int,
    ) -> None:
        self._teacher = teacher
        self._template = template
        self._options = options
        self._random = torch.Generator().manual_seed((options.seed << 20) + index)
        rows, room = options.rows, options.max_tokens
        self._tokens = torch.zeros(rows, room, dtype=torch.int64)
        self._top = torch.zeros(rows, room, dtype=torch.int32)
        self._segments = torch.full((rows, room), shards.SEGMENT_TEMPLATE, dtype=torch.uint8)
        self._ends = torch.zeros(rows, dtype=torch.int64)
        width = len(teacher.tap_layers) * teacher.shape.hidden
        kept = room if options.features else 0
        self._taps = torch.zeros(rows, kept, width, dtype=torch.bfloat16)
        self._hidden = torch.zeros(rows, kept, teacher.shape.hidden, dtype=torch.bfloat16)
        self._is_greedy = torch.rand(rows, generator=self._random) < options.greedy_fraction
        # Per row: tokens still to be given rather than chosen, those of the user's turn still to come, and whether
        # the answer has begun.
        self._given: list[deque[int]] = []
        self._user_left: list[int] = []
        for _ in range(rows):
            given, user_left = self._user_turn(tokenizer)
            self._given.append(deque(given))
            self._user_left.append(user_left)
        self._answering = [False] * rows
        self._closing = [False] * rows

    def _user_turn(self, tokenizer: Tokenizer) -> tuple[list[int], int]:
        """Tokens given to one row, and how many its user turn may have: an ask, a stem or nothing."""
        options, template = self._options, self._template
        kind, with_stem, choice = torch.rand(3, generator=self._random).tolist()
        encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731
        if kind < options.ask_fraction:
            ask = encode(draw_ask(self._random))[: options.max_user_tokens - 1]
            return [*ask, *template.switch], len(ask) + 1
        stem = encode(STEMS[int(choice * len(STEMS))]) if with_stem < options.stem_fraction else []
        return stem[: options.max_user_tokens - 1], options.max_user_tokens

    def write(self) -> shards.Shard:
        """Runs the batch to its end."""
        options, header = self._options, self._template.header
        active = torch.arange(options.rows)
        cache = self._teacher.new_cache(options.rows, options.max_tokens)
        fed = torch.tensor(header).repeat(options.rows, 1)
        self._tokens[:, : len(header)] = fed
        position = len(header)
        while True:
            hidden, taps = self._teacher.forward(fed, cache)
            last = position - 1
            if options.features:
                span = slice(position - fed.shape[1], position)
                self._hidden[active, span] = hidden.bfloat16()
                self._taps[active, span] = taps.flatten(2).bfloat16()
            # Rows that closed a turn have had their features stored; they may leave now.
            done = [self._closing[r] for r in active.tolist()]
            if position == options.max_tokens:
                done = [True] * len(done)
            for row, is_done in zip(active.tolist(), done, strict=True):
                if is_done and not self._ends[row]:
                    self._ends[row] = position
            stay = torch.tensor([not x for x in done])
            if not stay.any():
                break
            if int(stay.sum()) <= 0.85 * active.numel():
                keep = stay.nonzero().squeeze(1)
                cache.compact(keep)
                active, hidden = active[keep], hidden[keep]
            chosen = self._choose(active, self._teacher.logits(hidden[:, -1]), last)
            self._tokens[active, position] = chosen
            fed = chosen[:, None]
            position += 1
            if position % _LOOP_CHECK_STEPS == 0:
                self._close_loops(active, position)
        return self._pack()

    def _choose(self, active: Tensor, logits: Tensor, last: int) -> Tensor:
        """The next token of every active row, given or chosen: ``[rows, vocab]`` -> int64 ``[rows]``."""
        options, end = self._options, self._template.end_of_turn
        values, candidates = logits.topk(min(options.top_k, logits.shape[-1]), dim=-1)
        self._top[active, last] = candidates[:, 0].int()
        rows = active.tolist()
        warm = [options.answer_temperature if self._answering[r] else options.user_temperature for r in rows]
        probs = (values.float() / torch.tensor(warm)[:, None]).softmax(-1)
        probs[(probs.cumsum(-1) - probs) >= options.top_p] = 0.0
        drawn = torch.multinomial(probs, 1, generator=self._random)
        chosen = candidates.gather(1, drawn).squeeze(1).tolist()
        best = candidates[:, 0].tolist()
        for i, row in enumerate(rows):
            answering = self._answering[row]
            if self._closing[row]:
                continue
            if self._given[row]:
                chosen[i] = self._given[row].popleft()
                segment = (
                    shards.SEGMENT_USER
                    if not answering and self._user_left[row] > 0
                    else shards.SEGMENT_TEMPLATE
                )
                if not self._given[row] and self._user_left[row] <= 0:
                    self._answering[row] = True
            elif answering:
                if self._is_greedy[row]:
                    chosen[i] = best[i]
                segment = shards.SEGMENT_ANSWER
                self._closing[row] = chosen[i] == end
            else:
                segment = shards.SEGMENT_USER
                if chosen[i] == end or self._user_left[row] == 1:
                    chosen[i] = end
                    self._given[row] = deque(self._template.switch[1:])
                    self._user_left[row] = 0
            self._user_left[row] -= 1
            self._segments[row, last + 1] = segment
        return torch.tensor(chosen)

    def _close_loops(self, active: Tensor, position: int) -> None:
        """Ends answers that repeat themselves: the last window equals itself shifted by a short period."""
        if position < _LOOP_WINDOW + _LOOP_MAX_PERIOD:
            return
        window = self._tokens[active, position - _LOOP_WINDOW - _LOOP_MAX_PERIOD : position]
        tail = window[:, _LOOP_MAX_PERIOD:]
        for period in range(1, _LOOP_MAX_PERIOD + 1):
            same = (tail == window[:, _LOOP_MAX_PERIOD - period : -period]).all(dim=1)
            for row in active[same].tolist():
                if self._answering[row]:
                    self._closing[row] = True

    def _pack(self) -> shards.Shard:
        rows = range(self._options.rows)
        ends = self._ends.tolist()
        flat = lambda x: torch.cat([x[r, : ends[r]] for r in rows])  # noqa: E731
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), self._ends.cumsum(0)])
        features = self._options.features
        return shards.Shard(
            tokens=flat(self._tokens).int(),
            top_tokens=flat(self._top),
            segments=flat(self._segments),
            offsets=offsets,
            is_greedy=self._is_greedy.to(torch.uint8),
            taps=flat(self._taps) if features else None,
            hidden=flat(self._hidden) if features else None,
        )
