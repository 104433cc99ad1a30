"""The plain text of each request: one token per step, alone on the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.sampling.noise import NoiseRole, gumbel
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import process_logits
from paceline.sampling.row_params import RowParams
from paceline.target import SequenceRows, TargetEngine

TIE = 1e-4
"""Kernels that sum in another order may rank two candidates differently if they are closer than this."""


@dataclass(frozen=True, slots=True)
class PlainText:
    """A text and how clearly each token was chosen.

    Attributes:
        gaps: of each token, the distance between the best and the second-best candidate, noise included.
    """

    tokens: tuple[int, ...]
    gaps: tuple[float, ...]


class PlainTexts:
    """Texts by prompt and sampling parameters, made once."""

    def __init__(self, engine: TargetEngine, num_tokens: int) -> None:
        self._engine = engine
        self._num_tokens = num_tokens
        self._made: dict[tuple[tuple[int, ...], SamplingParams], PlainText] = {}

    def of(self, prompt: Sequence[int], sampling: SamplingParams) -> PlainText:
        """The text behind a prompt, never cut by a stop token."""
        key = tuple(prompt), sampling
        if key not in self._made:
            self._made[key] = self._run(key[0], sampling)
        return self._made[key]

    def _run(self, prompt: tuple[int, ...], sampling: SamplingParams) -> PlainText:
        tokens: list[int] = []
        gaps: list[float] = []
        with torch.inference_mode():
            slot = self._engine.open(len(prompt))
            feed: list[int] = list(prompt)
            while len(tokens) < self._num_tokens:
                logits = self._engine.step([SequenceRows(slot, feed, num_logits="last")]).logits[0]
                scores = _scores(logits, len(prompt) + len(tokens), sampling)
                best = scores.topk(2)
                tokens.append(int(best.indices[0]))
                gaps.append(float(best.values[0] - best.values[1]))
                feed = tokens[-1:]
            self._engine.close(slot)
        return PlainText(tuple(tokens), tuple(gaps))


def _scores(logits: Tensor, position: int, sampling: SamplingParams) -> Tensor:
    """What the choice is the largest of, `[vocab]`: logits, or processed logits with the position's noise."""
    logits = logits.clone()
    for token, bias in sampling.logit_bias:
        logits[0, token] += bias
    if sampling.is_greedy:
        return logits[0]
    rows = RowParams.build([sampling], [1], logits.device)
    noise = gumbel(rows.seeds, torch.tensor([position]), NoiseRole.TARGET, logits.shape[1])
    return (process_logits(logits, rows) + noise)[0]
