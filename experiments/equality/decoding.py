"""Decoding on the engine itself, with and without drafts, alone and in company.

Responsible for the tokens, how clearly each was chosen, and what each step took. It uses no service: what differs
between two runs here differs because of the arithmetic alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.draft_tree import EMPTY_TREE
from paceline.methods.drafter import Drafter, DraftRequest
from paceline.sampling.batch import verify_step
from paceline.sampling.noise import NoiseRole, gumbel
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import process_logits
from paceline.sampling.row_params import RowParams
from paceline.target import SequenceRows, TargetEngine
from paceline.trie import DraftTrie


@dataclass(frozen=True, slots=True)
class DraftShape:
    """What is drafted: `num_tokens` in a row, `max_nodes` in all."""

    num_tokens: int
    max_nodes: int


@dataclass(slots=True)
class Text:
    """One generated text.

    Attributes:
        gaps: of each token, the distance between the best and the second-best candidate, the noise of coupled sampling
            included.
        step_s: seconds of each decode step.
        num_accepted: drafted tokens among them.
    """

    tokens: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    num_accepted: int = 0


@dataclass(slots=True)
class _Sequence:
    prompt: list[int]
    sampling: SamplingParams
    slot: int
    trie: DraftTrie
    text: Text = field(default_factory=Text)
    num_cached: int = 0

    @property
    def committed(self) -> list[int]:
        return self.prompt + self.text.tokens


def decode(
    engine: TargetEngine,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[SamplingParams],
    num_tokens: int,
    drafter: Drafter | None = None,
    shape: DraftShape | None = None,
) -> list[Text]:
    """Texts of `num_tokens` tokens each, all sequences together in every step; end tokens do not end them.

    Args:
        engine: the target.
        prompts: token ids.
        samplings: greedy or coupled, one for each prompt.
        num_tokens: length of the texts.
        drafter: with `shape`, drafts in every step.
        shape: of the drafts.
    """
    sequences = [
        _Sequence(list(prompt), sampling, engine.open(len(prompt) + num_tokens), DraftTrie(list(prompt)))
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    drafts = _Drafts(drafter, shape, sequences) if drafter is not None and shape is not None else None
    with torch.inference_mode():
        while running := [sequence for sequence in sequences if len(sequence.text.tokens) < num_tokens]:
            _step(engine, running, num_tokens, drafts)
            if drafts is not None:
                drafts.add([s for s in running if num_tokens - len(s.text.tokens) > 1])
    for sequence in sequences:
        engine.close(sequence.slot)
    if drafts is not None:
        drafts.close()
    return [sequence.text for sequence in sequences]


class _Drafts:
    """A drafter that follows the sequences, which are numbered as they stand."""

    def __init__(self, drafter: Drafter, shape: DraftShape, sequences: Sequence[_Sequence]) -> None:
        self._drafter = drafter
        self._shape = shape
        self._numbers = {sequence.slot: number for number, sequence in enumerate(sequences)}
        for sequence in sequences:
            drafter.open(self._numbers[sequence.slot], sequence.prompt)

    def follow(self, sequence: _Sequence, first_row: int, features: Tensor | None, tokens: list[int]) -> None:
        """Tell the drafter what was committed, and the features of the rows before."""
        number = self._numbers[sequence.slot]
        self._drafter.extend(number, len(sequence.committed) - len(tokens), tokens)
        if features is not None and self._drafter.tap is not None:
            self._drafter.feed(number, first_row, features)

    def add(self, sequences: Sequence[_Sequence]) -> None:
        """Draft for all of them together."""
        wanted = [
            DraftRequest(self._numbers[s.slot], self._shape.num_tokens, self._shape.max_nodes, s.sampling)
            for s in sequences
        ]
        for sequence, entry in zip(sequences, self._drafter.draft(wanted), strict=True):
            if entry is not None:
                sequence.trie.add(entry)

    def close(self) -> None:
        """Let the drafter forget the sequences."""
        for number in self._numbers.values():
            self._drafter.close(number)


def _step(
    engine: TargetEngine, running: Sequence[_Sequence], num_tokens: int, drafts: _Drafts | None
) -> None:
    """One pass: run, verify, commit."""
    trees, batch = [], []
    for sequence in running:
        settled = sequence.committed[sequence.num_cached :]
        is_decoding = len(settled) == 1
        most_depth = num_tokens - len(sequence.text.tokens) - 1
        tree = sequence.trie.select_best(64, most_depth) if is_decoding and most_depth > 0 else EMPTY_TREE
        trees.append(tree)
        if is_decoding:
            batch.append(SequenceRows.decode(sequence.slot, settled[0], tree.tokens, tree.parents or None))
        else:
            batch.append(SequenceRows(sequence.slot, settled, num_logits="last"))
    started_s = time.perf_counter()
    output = engine.step(batch)
    elapsed_s = time.perf_counter() - started_s
    lengths = [len(sequence.committed) for sequence in running]
    verdicts = verify_step(torch.cat(output.logits), trees, lengths, [s.sampling for s in running])
    for which, (sequence, verdict) in enumerate(zip(running, verdicts, strict=True)):
        num_settled = lengths[which] - sequence.num_cached
        kept = [*range(num_settled), *(num_settled - 1 + row for row in verdict.accepted_rows)]
        engine.keep(sequence.slot, kept)
        first_row, sequence.num_cached = sequence.num_cached, sequence.num_cached + len(kept)
        committed = list(verdict.committed_tokens)[: num_tokens - len(sequence.text.tokens)]
        for token_index in range(len(committed)):
            row = 0 if token_index == 0 else verdict.accepted_rows[token_index - 1]
            position = lengths[which] + token_index
            sequence.text.gaps.append(_gap(output.logits[which][row], position, sequence.sampling))
        sequence.text.tokens += committed
        sequence.text.num_accepted += min(len(verdict.accepted_tokens), len(committed))
        if num_settled == 1:
            sequence.text.step_s.append(elapsed_s)
        sequence.trie.commit(committed)
        if drafts is not None:
            features = output.features[which][kept] if output.features else None
            drafts.follow(sequence, first_row, features, committed)


def _gap(logits: Tensor, position: int, sampling: SamplingParams) -> float:
    """How far the best of `[vocab]` candidates is ahead of the second best."""
    scores = logits
    if not sampling.is_greedy:
        rows = RowParams.build([sampling], [1], logits.device)
        noise = gumbel(rows.seeds, torch.tensor([position]), NoiseRole.TARGET, logits.shape[0])
        scores = (process_logits(logits[None], rows) + noise)[0]
    best = scores.topk(2).values
    return float(best[0] - best[1])
