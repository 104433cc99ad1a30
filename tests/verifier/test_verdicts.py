"""Joining a step's logits, and judging them under rules."""

from __future__ import annotations

import asyncio

import pytest
import torch

from paceline.sampling import LogitBias, SamplingParams, Verdict, maxima_of
from paceline.trie import EMPTY_TREE, DraftTree
from services.verifier.sequence import SequenceSpec, TargetSequence
from services.verifier.session import Session
from services.verifier.verdicts import joined, judge


def test_neighbours_are_joined_without_a_copy() -> None:
    step = torch.randn(9, 7)
    parts = list(step[1:8].split([2, 1, 4]))
    whole = joined(parts)
    assert torch.equal(whole, step[1:8])
    assert whole.data_ptr() == step[1].data_ptr()
    whole[0, 0] = 5.0
    assert float(step[1, 0]) == 5.0


def test_others_are_copied() -> None:
    step = torch.randn(9, 7)
    one, two, three = step.split([2, 3, 4])
    for parts in (
        [two, one, three],
        [one, three],
        [one, two.clone()],
        [step[:, :3], step[:, 3:6]],
        [one, one],
    ):
        assert torch.equal(joined(parts), torch.cat(parts))
    assert joined([two]).data_ptr() == two.data_ptr()


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0), SamplingParams(seed=5)])
def test_maxima_follow_the_rules(sampling: SamplingParams) -> None:
    """A rule changes logits after the target has noted the largest of them."""
    logits = list(torch.randn(4, 80, generator=torch.Generator().manual_seed(1)).split([1, 1, 2]))
    best = int(logits[0].argmax())
    sequences = [sequence(sampling, bias) for bias in ({best: -100.0}, {}, {7: 100.0})]
    trees = [EMPTY_TREE, EMPTY_TREE, DraftTree((7,), (-1,), (1,), (0.5,), (None,))]
    plain = judge(sequences, trees, [part.clone() for part in logits])
    judged = judge(sequences, trees, logits, [maxima_of(part) for part in logits])
    assert judged == plain
    assert isinstance(judged[0], Verdict)
    assert isinstance(judged[2], Verdict)
    assert judged[0].committed_tokens != (best,)
    assert judged[2].committed_tokens == (7, 7)


def sequence(sampling: SamplingParams, bias: dict[int, float]) -> TargetSequence:
    loop = asyncio.new_event_loop()
    loop.close()
    spec = SequenceSpec(1, 0, (1, 2, 3), sampling, 10, frozenset(), 8)
    made = TargetSequence(1, spec, Session(loop, "test"), 100, 80)
    made.rules = [LogitBias(list(bias.items()))] if bias else []
    return made
