"""``paceline data continue``: text that a target without a chat template writes itself, from given beginnings.

Responsible for sampling on the serving engine, whatever the model's family, and for the folder of tokens. Features are
not kept: `paceline data features` adds them. Knows no drafter. Chat models are better taught by ``paceline data
synth``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from paceline.models import end_tokens
from paceline.target import SequenceRows, TargetEngine
from paceline.training import shards
from paceline.training.options import check_options, option
from paceline.training.prompts import STEMS, draw_ask
from paceline.training.text_folder import TextOptions, write_missing_shards
from paceline.training.text_sampling import repeats_itself, sample_nucleus


@dataclass(frozen=True, slots=True)
class ContinueOptions(TextOptions):
    """Options of :func:`run`.

    Attributes:
        model_dir: the target (transformers directory with safetensors and tokenizer).
        ask_fraction: fraction of beginnings that are a whole question; the others are first words.
        greedy_fraction: fraction of texts that continue greedily.
        temperature: of the others.
    """

    ask_fraction: float = option(0.5, minimum=0, maximum=1)
    temperature: float = option(0.8, above=0, below=float("inf"))


def run(options: ContinueOptions) -> dict[str, int]:
    """Writes the shards that are not there yet.

    Returns:
        Counts over the whole folder: ``shards``, ``conversations`` (texts), ``tokens``, ``answer_tokens``.

    Raises:
        TrainingDataError: an option does not fit.
    """
    check_options(options)
    if options.num_threads:
        torch.set_num_threads(options.num_threads)
    tokenizer = Tokenizer.from_file(str(options.model_dir / "tokenizer.json"))
    engine = TargetEngine.load(options.model_dir, dtype=options.torch_dtype)
    ends = frozenset(end_tokens(options.model_dir))

    def write(index: int) -> shards.Shard:
        return write_texts(engine, tokenizer, options, index, ends)

    return write_missing_shards(options, "continue", "paceline-continuations", write)


def write_texts(
    engine: TargetEngine, tokenizer: Tokenizer, options: ContinueOptions, index: int, ends: frozenset[int]
) -> shards.Shard:
    """One shard: a token of every text a step, until all texts have ended.

    Args:
        engine: the target.
        tokenizer: its tokenizer; what it puts before a text is kept.
        options: of the run.
        index: of the shard.
        ends: tokens that end a text.
    """
    random = options.generator(index)
    texts: list[list[int]] = []
    for _ in range(options.rows):
        is_ask, choice = torch.rand(2, generator=random).tolist()
        words = draw_ask(random) + "\n" if is_ask < options.ask_fraction else STEMS[int(choice * len(STEMS))]
        texts.append(list(tokenizer.encode(words).ids[: options.max_tokens - 1]))
    prompts = [len(text) for text in texts]
    tops = [[-1] * (prompt - 1) for prompt in prompts]
    is_greedy = torch.rand(options.rows, generator=random) < options.greedy_fraction
    slots = [engine.open(options.max_tokens) for _ in texts]
    pending = [list(text) for text in texts]  # tokens still to be run
    active = list(range(options.rows))

    def has_ended(row: int) -> bool:
        text = texts[row]
        is_full = len(text) >= options.max_tokens
        return is_full or text[-1] in ends or repeats_itself(text[prompts[row] :])

    while active:
        step = engine.step([SequenceRows(slots[row], pending[row], num_logits="last") for row in active])
        logits = torch.cat(step.logits)
        best, chosen = logits.argmax(-1).tolist(), _sample(logits, options, random).tolist()
        for i, row in enumerate(active):
            token = best[i] if is_greedy[row] else chosen[i]
            tops[row].append(best[i])
            texts[row].append(token)
            pending[row] = [token]
        active = [row for row in active if not has_ended(row)]
    for slot in slots:
        engine.close(slot)
    lengths = [len(text) for text in texts]
    segments = [
        [shards.SEGMENT_USER] * prompt + [shards.SEGMENT_ANSWER] * (length - prompt)
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    return shards.Shard(
        tokens=torch.tensor([token for text in texts for token in text], dtype=torch.int32),
        top_tokens=torch.tensor([token for top in tops for token in (*top, -1)], dtype=torch.int32),
        segments=torch.tensor([segment for one in segments for segment in one], dtype=torch.uint8),
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        is_greedy=is_greedy.to(torch.uint8),
        taps=None,
        hidden=None,
    )


def _sample(logits: Tensor, options: ContinueOptions, random: torch.Generator) -> Tensor:
    """A token of each row, int64 ``[rows]``."""
    values, candidates = logits.topk(min(options.top_k, logits.shape[-1]), dim=-1)
    drawn = sample_nucleus(values, options.temperature, options.top_p, random)
    return candidates.gather(1, drawn).squeeze(1)
