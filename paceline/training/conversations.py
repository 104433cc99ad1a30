"""Conversations written in one static batch, from the bare header of the chat template to the last closed answer.

Every row of the batch appends exactly one token a step, given (template, question, first words) or chosen (sampled,
greedy). So all rows have the same positions: no padding and no masks. Called by :mod:`paceline.training.synth`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from paceline.training import shards
from paceline.training.options import option
from paceline.training.prompts import STEMS, draw_ask
from paceline.training.teacher import Teacher
from paceline.training.template import TurnTemplate
from paceline.training.text_folder import TextOptions
from paceline.training.text_sampling import repeats_itself, sample_nucleus

_LOOP_CHECK_STEPS = 16
_MIN_LEAVING = 0.15
"""Fraction of rows that must have ended before the batch is compacted, which copies the cache."""


@dataclass(frozen=True, slots=True)
class SynthOptions(TextOptions):
    """Options of conversations.

    Attributes:
        model_dir: the target (transformers directory with safetensors, tokenizer and chat template).
        rows: conversations per shard, written as one batch.
        max_tokens: most tokens of a conversation, template included.
        max_user_tokens: the user turn is closed after this many.
        ask_fraction: fraction of user turns that are given whole, a task about a topic.
        stem_fraction: fraction of the others that begin with given first words.
        greedy_fraction: fraction of conversations that are answered greedily.
        answer_temperature: temperature of the other answers.
        user_temperature: temperature of user turns.
        features: store what feature-reading drafters learn from.
    """

    rows: int = option(128, minimum=1)
    max_tokens: int = option(320, minimum=1)
    max_user_tokens: int = option(96, minimum=1)
    ask_fraction: float = option(0.5, minimum=0, maximum=1)
    stem_fraction: float = option(0.6, minimum=0, maximum=1)
    greedy_fraction: float = option(0.6, minimum=0, maximum=1)
    answer_temperature: float = option(0.7, above=0, below=float("inf"))
    user_temperature: float = option(1.0, above=0, below=float("inf"))
    features: bool = True


@dataclass(slots=True)
class _Row:
    """Where the conversation of one row is.

    Attributes:
        given: tokens that follow whatever the model would choose.
        user_left: tokens that the user turn may still have.
        is_greedy: whether the answer is greedy.
        is_answering: the answer has begun.
        is_closing: the last token was appended. The row leaves once its features are stored.
    """

    given: deque[int]
    user_left: int
    is_greedy: bool
    is_answering: bool = False
    is_closing: bool = False

    def advance(self, sampled: int, best: int, template: TurnTemplate) -> tuple[int, int]:
        """The next token and its segment.

        Args:
            sampled: what was drawn for the row.
            best: the model's likeliest token.
            template: of the chat.
        """
        token, segment = sampled, shards.SEGMENT_USER
        if self.given:
            token = self.given.popleft()
            if self.is_answering or self.user_left <= 0:
                segment = shards.SEGMENT_TEMPLATE
            if not self.given and self.user_left <= 0:
                self.is_answering = True
        elif self.is_answering:
            token, segment = best if self.is_greedy else sampled, shards.SEGMENT_ANSWER
            self.is_closing = token == template.end_of_turn
        elif sampled == template.end_of_turn or self.user_left == 1:
            token = template.end_of_turn
            self.given, self.user_left = deque(template.switch[1:]), 0
        self.user_left -= 1
        return token, segment


class ConversationBatch:
    """One shard's conversations.

    Args:
        teacher: the target.
        template: of its chat.
        tokenizer: of the target.
        options: of the run.
        index: of the shard.
    """

    def __init__(
        self,
        teacher: Teacher,
        template: TurnTemplate,
        tokenizer: Tokenizer,
        options: SynthOptions,
        index: int,
    ) -> None:
        self._teacher, self._template, self._options = teacher, template, options
        self._random = options.generator(index)
        count, room = options.rows, options.max_tokens
        self._tokens = torch.zeros(count, room, dtype=torch.int64)
        self._top = torch.zeros(count, room, dtype=torch.int32)
        self._segments = torch.full((count, room), shards.SEGMENT_TEMPLATE, dtype=torch.uint8)
        self._ends = torch.zeros(count, dtype=torch.int64)
        width = len(teacher.tap_layers) * teacher.shape.hidden
        kept = room if options.features else 0
        self._taps = torch.zeros(count, kept, width, dtype=torch.bfloat16)
        self._hidden = torch.zeros(count, kept, teacher.shape.hidden, dtype=torch.bfloat16)
        self._is_greedy = torch.rand(count, generator=self._random) < options.greedy_fraction
        self._rows = [self._new_row(tokenizer, bool(is_greedy)) for is_greedy in self._is_greedy]

    def _new_row(self, tokenizer: Tokenizer, is_greedy: bool) -> _Row:
        """A row whose user turn is a whole question, begins with first words, or is made up entirely."""
        options, template = self._options, self._template
        kind, with_stem, choice = torch.rand(3, generator=self._random).tolist()
        most = options.max_user_tokens
        if kind < options.ask_fraction:
            ask = _encode(tokenizer, draw_ask(self._random))[: most - 1]
            return _Row(deque([*ask, *template.switch]), len(ask) + 1, is_greedy)
        stem = STEMS[int(choice * len(STEMS))] if with_stem < options.stem_fraction else ""
        return _Row(deque(_encode(tokenizer, stem)[: most - 1]), most, is_greedy)

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
            if options.features:
                span = slice(position - fed.shape[1], position)
                self._hidden[active, span] = hidden.bfloat16()
                self._taps[active, span] = taps.flatten(2).bfloat16()
            # The features of rows that closed are stored now, so these rows may leave.
            is_full = position == options.max_tokens
            stay = torch.tensor([not is_full and not self._rows[row].is_closing for row in active.tolist()])
            ended = active[~stay]
            self._ends[ended] = torch.where(self._ends[ended] == 0, position, self._ends[ended])
            if not stay.any():
                return self._pack()
            if int(stay.sum()) <= (1.0 - _MIN_LEAVING) * active.numel():
                keep = stay.nonzero().squeeze(1)
                cache.compact(keep)
                active, hidden = active[keep], hidden[keep]
            chosen = self._choose(active, self._teacher.logits(hidden[:, -1]), position)
            self._tokens[active, position] = chosen
            fed = chosen[:, None]
            position += 1
            if position % _LOOP_CHECK_STEPS == 0:
                self._close_loops(active, position)

    def _choose(self, active: Tensor, logits: Tensor, position: int) -> Tensor:
        """The token of every active row at a position, given or chosen: ``[rows, vocab]`` to int64 ``[rows]``."""
        options = self._options
        values, candidates = logits.topk(min(options.top_k, logits.shape[-1]), dim=-1)
        self._top[active, position - 1] = candidates[:, 0].int()
        rows = [self._rows[row] for row in active.tolist()]
        temperatures = torch.tensor(
            [options.answer_temperature if row.is_answering else options.user_temperature for row in rows]
        )
        drawn = sample_nucleus(values.float(), temperatures[:, None], options.top_p, self._random)
        chosen = candidates.gather(1, drawn).squeeze(1).tolist()
        best = candidates[:, 0].tolist()
        for i, (index, row) in enumerate(zip(active.tolist(), rows, strict=True)):
            if not row.is_closing:
                chosen[i], segment = row.advance(chosen[i], best[i], self._template)
                self._segments[index, position] = segment
        return torch.tensor(chosen)

    def _close_loops(self, active: Tensor, position: int) -> None:
        """Ends answers that repeat themselves."""
        for index in active.tolist():
            row = self._rows[index]
            if row.is_answering and repeats_itself(self._tokens[index, :position].tolist()):
                row.is_closing = True

    def _pack(self) -> shards.Shard:
        ends = self._ends.tolist()

        def flat(x: Tensor) -> Tensor:
            return torch.cat([row[:end] for row, end in zip(x, ends, strict=True)])

        features = self._options.features
        return shards.Shard(
            tokens=flat(self._tokens).int(),
            top_tokens=flat(self._top),
            segments=flat(self._segments),
            offsets=torch.cat([torch.zeros(1, dtype=torch.int64), self._ends.cumsum(0)]),
            is_greedy=self._is_greedy.to(torch.uint8),
            taps=flat(self._taps) if features else None,
            hidden=flat(self._hidden) if features else None,
        )


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids
