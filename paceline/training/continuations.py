"""Text that a target without a chat template writes itself: it goes on from the beginning of a document.

Responsible for sampling on the serving engine, whatever the model's family, and for writing tokens as shards. Features
are not kept: objectives that learn from such shards compute them anew (`target_rows.py`). Deliberately knows no
drafter. Called by ``paceline data continue``. Chat models are better taught by ``paceline data synth``.

A shard depends on (seed, shard index) and the weights alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog
import torch
from tokenizers import Tokenizer
from torch import Tensor

from paceline.contract.errors import TrainingDataError
from paceline.models import end_tokens, model_fingerprint
from paceline.target import SequenceRows, TargetEngine
from paceline.training import shards
from paceline.training.prompts import STEMS, draw_ask
from paceline.training.synth import folder_counts, write_counts

log = structlog.get_logger()

_MAX_PERIOD = 24
_LOOP_TOKENS = 48


@dataclass(frozen=True, slots=True)
class ContinueOptions:
    """Options of :func:`run`.

    Attributes:
        model_dir: the target (transformers directory with safetensors and tokenizer).
        out_dir: folder of the shards; existing shards are kept.
        seed: names the text together with the shard index.
        first_shard: index of the first shard to write.
        num_shards: shards to write; several processes may share a folder with disjoint ranges.
        rows: texts per shard, written together.
        max_tokens: tokens of a text at most, its beginning included.
        ask_fraction: share of beginnings that are a whole question; the others are first words.
        greedy_fraction: share of texts that go on greedily.
        temperature: of the others.
        top_p: their nucleus.
        top_k: candidates looked at before the nucleus.
        dtype: compute type, ``bfloat16`` or ``float32``.
        num_threads: torch threads, 0 = leave as they are.
    """

    model_dir: Path
    out_dir: Path
    seed: int = 1
    first_shard: int = 0
    num_shards: int = 1
    rows: int = 32
    max_tokens: int = 192
    ask_fraction: float = 0.5
    greedy_fraction: float = 0.5
    temperature: float = 0.8
    top_p: float = 0.95
    top_k: int = 64
    dtype: str = "bfloat16"
    num_threads: int = 0

    def validate(self) -> None:
        """Raises :class:`TrainingDataError` naming the first field out of range."""
        for name in ("num_shards", "rows", "top_k"):
            if getattr(self, name) < 1:
                raise TrainingDataError(f"{name} must be at least 1")
        if self.max_tokens < 3:
            raise TrainingDataError("max_tokens must be at least 3")
        for name in ("ask_fraction", "greedy_fraction"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise TrainingDataError(f"{name} must lie in [0, 1]")
        if not 0.0 < self.top_p <= 1.0:
            raise TrainingDataError("top_p must be above 0 and at most 1")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise TrainingDataError("temperature must be positive")
        if self.dtype not in ("bfloat16", "float32"):
            raise TrainingDataError("dtype must be bfloat16 or float32")


def run(options: ContinueOptions) -> dict[str, int]:
    """Writes the shards that are not there yet.

    Returns:
        Counts over the whole folder: ``shards``, ``conversations`` (texts), ``tokens``, ``answer_tokens``.
    """
    options.validate()
    if options.num_threads:
        torch.set_num_threads(options.num_threads)
    options.out_dir.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(options.model_dir / "tokenizer.json"))
    engine = TargetEngine.load(options.model_dir, dtype=getattr(torch, options.dtype))
    fingerprint = model_fingerprint(options.model_dir)
    ends = frozenset(end_tokens(options.model_dir))
    for index in range(options.first_shard, options.first_shard + options.num_shards):
        path = shards.shard_path(options.out_dir, index)
        if path.exists():
            continue
        started = time.monotonic()
        shard = write_texts(engine, tokenizer, options, index, ends)
        shards.write_shard(path, shard)
        write_counts(path, shard)
        settings = {
            k: v
            for k, v in asdict(options).items()
            if k not in ("model_dir", "out_dir", "first_shard", "num_shards")
        }
        command = (
            f"paceline data continue {options.model_dir.name} {options.out_dir.name} --seed {options.seed} "
            f"--rows {options.rows} --max-tokens {options.max_tokens}"
        )
        manifest = {
            "kind": "paceline-continuations",
            "model_fingerprint": fingerprint,
            "command": command,
            "settings": settings,
            "counts": folder_counts(options.out_dir),
        }
        shards.write_manifest(options.out_dir, manifest)
        seconds, n = time.monotonic() - started, shard.tokens.numel()
        log.info(
            "shard_written", shard=index, tokens=n, seconds=round(seconds, 1), rate=round(n / seconds, 1)
        )
    return folder_counts(options.out_dir)


def write_texts(
    engine: TargetEngine, tokenizer: Tokenizer, options: ContinueOptions, index: int, ends: frozenset[int]
) -> shards.Shard:
    """One shard: all its texts a token at a time, those that have ended left out.

    Args:
        engine: the target.
        tokenizer: its tokenizer; whatever it puts in front of a text is kept.
        options: of the run.
        index: of the shard.
        ends: tokens that end a text.
    """
    random = torch.Generator().manual_seed((options.seed << 20) + index)
    texts, prompts, tops = [], [], []
    for _ in range(options.rows):
        is_ask, choice = torch.rand(2, generator=random).tolist()
        words = draw_ask(random) + "\n" if is_ask < options.ask_fraction else STEMS[int(choice * len(STEMS))]
        ids = tokenizer.encode(words).ids[: options.max_tokens - 1]
        texts.append(list(ids))
        prompts.append(len(ids))
        tops.append([-1] * (len(ids) - 1))
    is_greedy = torch.rand(options.rows, generator=random) < options.greedy_fraction
    slots = [engine.open(options.max_tokens) for _ in texts]
    waiting = [list(text) for text in texts]  # tokens still to be run
    active = list(range(options.rows))
    while active:
        step = engine.step([SequenceRows(slots[row], waiting[row], num_logits="last") for row in active])
        logits = torch.cat(step.logits)
        best, chosen = logits.argmax(-1).tolist(), _draw(logits, options, random).tolist()
        for place, row in enumerate(active):
            token = best[place] if is_greedy[row] else chosen[place]
            tops[row].append(best[place])
            texts[row].append(token)
            waiting[row] = [token]
        active = [row for row in active if not _has_ended(texts[row], prompts[row], options, ends)]
    for slot in slots:
        engine.close(slot)
    lengths = [len(one) for one in texts]
    segments = [
        [shards.SEGMENT_USER] * prompt + [shards.SEGMENT_ANSWER] * (length - prompt)
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    return shards.Shard(
        tokens=torch.tensor([t for one in texts for t in one], dtype=torch.int32),
        top_tokens=torch.tensor([t for one in tops for t in (*one, -1)], dtype=torch.int32),
        segments=torch.tensor([s for one in segments for s in one], dtype=torch.uint8),
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        is_greedy=is_greedy.to(torch.uint8),
        taps=None,
        hidden=None,
    )


def _draw(logits: Tensor, options: ContinueOptions, random: torch.Generator) -> Tensor:
    """A token of each row, int64 ``[rows]``."""
    values, candidates = logits.topk(min(options.top_k, logits.shape[-1]), dim=-1)
    probs = (values / options.temperature).softmax(-1)
    probs[(probs.cumsum(-1) - probs) >= options.top_p] = 0.0
    return candidates.gather(1, torch.multinomial(probs, 1, generator=random)).squeeze(1)


def _has_ended(tokens: Sequence[int], prompt: int, options: ContinueOptions, ends: frozenset[int]) -> bool:
    return len(tokens) >= options.max_tokens or tokens[-1] in ends or _loops(tokens[prompt:])


def _loops(tokens: Sequence[int]) -> bool:
    """Whether the last tokens are those before them, a short period later."""
    if len(tokens) < _LOOP_TOKENS + _MAX_PERIOD:
        return False
    tail = tokens[-_LOOP_TOKENS:]
    return any(tokens[-_LOOP_TOKENS - p : -p] == tail for p in range(1, _MAX_PERIOD + 1))
