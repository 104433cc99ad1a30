"""Verification of a step whose logits are changed by rules."""

from __future__ import annotations

import asyncio

import pytest
import torch

from paceline.draft_tree import EMPTY_TREE, DraftTree
from paceline.sampling.bias import LogitBias
from paceline.sampling.params import SamplingParams
from paceline.sampling.rows import maxima_of
from paceline.sampling.verify import Verdict
from services.verifier.sequence import TargetSequence
from services.verifier.session import VerifySession
from services.verifier.specs import SequenceSpec
from services.verifier.verification import verify_sequences


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0), SamplingParams(seed=5)])
def test_maxima_follow_the_rules(sampling: SamplingParams) -> None:
    """A rule changes logits after the target has noted the largest of them."""
    # Rows of another sequence's prompt lie between them, and they lie in an order of their own.
    logits = torch.randn(6, 80, generator=torch.Generator().manual_seed(1))
    firsts = [5, 1, 2]
    best = int(logits[5].argmax())
    sequences = [sequence(sampling, bias) for bias in ({best: -100.0}, {}, {7: 100.0})]
    trees = [EMPTY_TREE, EMPTY_TREE, DraftTree((7,), (-1,), (1,), (0.5,), (None,))]
    before = logits.clone()
    plain = verify_sequences(sequences, trees, logits.clone(), firsts)
    judged = verify_sequences(sequences, trees, logits, firsts, maxima_of(logits))
    assert torch.equal(logits[[0, 1, 4]], before[[0, 1, 4]])
    assert judged == plain
    assert isinstance(judged[0], Verdict)
    assert isinstance(judged[2], Verdict)
    assert judged[0].committed_tokens != (best,)
    assert judged[2].committed_tokens == (7, 7)


def sequence(sampling: SamplingParams, bias: dict[int, float]) -> TargetSequence:
    loop = asyncio.new_event_loop()
    loop.close()
    spec = SequenceSpec(1, 0, (1, 2, 3), sampling, 10, frozenset(), 8)
    made = TargetSequence(1, spec, VerifySession(loop, "test"), 100, 80)
    made.rules = [LogitBias(list(bias.items()))] if bias else []
    return made
