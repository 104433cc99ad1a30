"""The kinds of requests whose verification is measured, and drafts for them.

Deliberately does not know: engines, clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.draft_tree import DraftTree
from paceline.sampling.batch import verify_step
from paceline.sampling.choices import target_choices
from paceline.sampling.params import SamplingParams, VerifyMode
from paceline.sampling.row_params import RowParams

FIRST_POSITION = 64  # committed length of the measured sequences; any number does


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of request; `params` is the same for all its sequences but for the seed."""

    name: str
    params: SamplingParams

    def seeded(self, count: int) -> list[SamplingParams]:
        """The parameters of `count` sequences."""
        own = self.params
        return [
            SamplingParams(own.temperature, own.top_k, own.top_p, own.min_p, seed, own.mode)
            for seed in range(count)
        ]


CASES = (
    Case("greedy", SamplingParams(temperature=0)),
    Case("coupled", SamplingParams()),
    Case("coupled, temperature 0.7", SamplingParams(temperature=0.7)),
    Case("coupled, top-k 50", SamplingParams(top_k=50)),
    Case("coupled, top-p 0.9", SamplingParams(top_p=0.9)),
    Case("coupled, min-p 0.05", SamplingParams(min_p=0.05)),
    Case("coupled, all filters", SamplingParams(0.8, 50, 0.9, 0.02)),
    Case("rejection, one-hot", SamplingParams(mode=VerifyMode.REJECTION)),
    Case("rejection, top-p 0.9", SamplingParams(top_p=0.9, mode=VerifyMode.REJECTION)),
)


@dataclass(frozen=True, slots=True)
class Work:
    """One call of `verify_step`, ready to be made again and again."""

    logits: Tensor
    maxima: Tensor | None
    trees: list[DraftTree]
    lengths: list[int]
    params: list[SamplingParams]

    def run(self) -> int:
        """Verify; how many draft tokens were accepted."""
        verdicts = verify_step(self.logits, self.trees, self.lengths, self.params, self.maxima)
        return sum(len(verdict.accepted_tokens) for verdict in verdicts)


@dataclass(frozen=True, slots=True)
class Drafts:
    """The chain that every sequence of a step verifies.

    Attributes:
        length: draft tokens.
        num_right: of these the first ones that the target would choose itself; what comes after is wrong.
    """

    length: int
    num_right: int


def make_work(case: Case, logits: Tensor, maxima: Tensor | None, num_sequences: int, drafts: Drafts) -> Work:
    """Chains that are accepted as far as they are right and the mode allows; all right is what costs most.

    In greedy and coupled mode right tokens are the target's own choices at those rows, so that every row up to there is
    looked at. In rejection mode they are its likeliest tokens, each drafted with certainty.

    Args:
        case: what the requests ask for.
        logits: `[num_sequences * (1 + draft_length), vocab]` float32.
        maxima: of every 32 of them, where the target gives them.
        num_sequences: sequences in the step.
        drafts: of each.
    """
    params, rows = case.seeded(num_sequences), 1 + drafts.length
    lengths = [FIRST_POSITION] * num_sequences
    if case.params.resolved_mode is VerifyMode.REJECTION:
        choices = logits.argmax(dim=-1).tolist()
    else:
        positions = [FIRST_POSITION + row for _ in range(num_sequences) for row in range(rows)]
        choices = target_choices(logits, positions, RowParams.build(params, [rows] * num_sequences)).tolist()
    trees = [
        _chain(
            [
                token if place < drafts.num_right else (token + 1) % logits.shape[1]
                for place, token in enumerate(choices[first : first + drafts.length])
            ]
        )
        for first in range(0, len(choices), rows)
    ]
    return Work(logits, maxima, trees, lengths, params)


def _chain(tokens: Sequence[int]) -> DraftTree:
    count = len(tokens)
    return DraftTree(
        tuple(tokens),
        tuple(range(-1, count - 1)),
        tuple(range(1, count + 1)),
        (0.5,) * count,
        (None,) * count,
    )
