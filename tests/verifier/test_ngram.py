"""N-gram proposals at a verifier: repeated text is verified without a drafter, and no text changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.contract.policy import StepPolicy
from paceline.drafts import DraftEntry
from paceline.sampling.params import SamplingParams
from paceline.target import TargetEngine
from paceline.v1 import peer_pb2, sampling_pb2, target_pb2
from services.verifier.inbox import AddDrafts, Open, SetPolicy
from services.verifier.ngram import NgramProposers
from services.verifier.specs import SequenceSpec
from services.verifier.stopwatch import StepStage
from tests.simulation.verifier import ListedSession, SteppedVerifier
from tests.verifier.conductor import Conductor
from tests.verifier.conftest import serving

PROMPT = [7, 8, 9, 10, 11]
OFF = peer_pb2.StepPolicy(version=1)
"""A policy that asks for no drafts."""
FEW = dict.fromkeys((7, 8, 9), 80.0)
"""Biases that leave three tokens, so that the text often repeats itself, but not always."""


async def run(
    target_dir: Path,
    ngram_tokens: int,
    mode: int = sampling_pb2.VERIFY_MODE_UNSPECIFIED,
    temperature: float = 0.0,
    **fields: Any,
) -> tuple[list[int], list[target_pb2.StepReport]]:
    sampling = sampling_pb2.SamplingParams(temperature=temperature, seed=3, mode=mode, logit_bias=FEW)
    async with (
        serving(target_dir, ngram_tokens=ngram_tokens, profile_s=0.0) as process,
        Conductor(process.port) as conductor,
    ):
        await conductor.send(policy=OFF)
        [tokens] = await conductor.finish(await conductor.open(PROMPT, 120, sampling=sampling, **fields))
        return tokens, conductor.steps


@pytest.fixture
async def plain(target_dir: Path) -> list[int]:
    """The text without n-gram proposals, one pass per token."""
    tokens, steps = await run(target_dir, 0)
    assert len(steps) >= 120
    assert not any(number for step in steps for number in step.num_draft_tokens)
    return tokens


async def test_a_text_that_repeats_takes_fewer_passes(target_dir: Path, plain: list[int]) -> None:
    tokens, steps = await run(target_dir, 8)
    assert tokens == plain
    accepted = sum(sum(step.num_accepted_tokens) for step in steps)
    assert 20 < accepted < sum(sum(step.num_draft_tokens) for step in steps)
    assert len(steps) <= 120 - accepted + 1
    # The scheduler judges drafters by these: an n-gram proposal says nothing of one.
    assert not any(depth for step in steps for depth in step.drafter_depths)
    assert not any(number for step in steps for number in step.num_accepted_of_drafter)
    assert not any(number for step in steps for number in step.num_acceptance_samples)
    assert not any(hit for step in steps for hit in step.cache_hits)


async def test_a_request_without_speculation_gets_no_ngram_proposal(
    target_dir: Path, plain: list[int]
) -> None:
    tokens, steps = await run(target_dir, 8, max_draft_nodes=0)
    assert tokens == plain
    assert not any(number for step in steps for number in step.num_draft_tokens)


async def test_an_ngram_proposal_keeps_to_the_requests_limit(target_dir: Path, plain: list[int]) -> None:
    tokens, steps = await run(target_dir, 8, max_draft_nodes=2)
    assert tokens == plain
    assert max(number for step in steps for number in step.num_draft_tokens) == 2


@pytest.mark.parametrize(
    ("mode", "looks_up"),
    [
        (sampling_pb2.VERIFY_MODE_REJECTION, False),
        (sampling_pb2.VERIFY_MODE_BLOCK, False),
        (sampling_pb2.VERIFY_MODE_COUPLED, True),
    ],
)
async def test_modes_that_verify_draws_get_no_ngram_proposal(
    target_dir: Path, mode: int, looks_up: bool
) -> None:
    tokens, steps = await run(target_dir, 8, mode, 0.7)
    assert any(number for step in steps for number in step.num_draft_tokens) == looks_up
    if looks_up:
        assert tokens == (await run(target_dir, 0, mode, 0.7))[0]


@pytest.mark.parametrize("ngram_tokens", [0, 8])
def test_a_sure_ngram_proposal_does_not_wait_for_a_draft(target_dir: Path, ngram_tokens: int) -> None:
    """A draft is due for up to 100 ms; a text that repeats one token does not wait for it."""
    prompt = [7] * 40
    params = SamplingParams(temperature=0.0, logit_bias=((7, 100.0),))
    verifier = SteppedVerifier(TargetEngine.load(target_dir, dtype=torch.float32), ngram_tokens=ngram_tokens)
    session = ListedSession()
    spec = SequenceSpec(1, 0, tuple(prompt), params, 30, frozenset(), 8)
    verifier.put(SetPolicy(StepPolicy(wait_budget_us=100_000)), Open(session, spec))
    verifier.step()
    frames = session.take()
    [opened] = [opened for frame in frames for opened in frame.opened]
    draft = DraftEntry.chain(len(prompt), [0])
    verifier.put(AddDrafts(session, ((opened.sequence_id, 0, draft),), 0))
    verifier.step()
    assert (verifier.stats[-1].laps[StepStage.DRAFT_WAIT] > 0.09) == (ngram_tokens == 0)
    while verifier.table.num_unfinished:
        verifier.step()
    frames += session.take()
    assert [token for frame in frames for token in frame.step.commits.tokens] == [7] * 30
    verifier.close()


def test_bounds() -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        NgramProposers(65)
    with pytest.raises(ValueError, match="max_tokens"):
        NgramProposers(-1)
