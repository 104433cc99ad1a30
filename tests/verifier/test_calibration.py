"""Calibrated confidences in the verifier: which tokens get them, which must not, and what is reported."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from paceline.drafts import DraftEntry, DraftError, DrawRule, SiblingDraws
from paceline.sampling.params import SamplingParams, VerifyMode
from paceline.scheduling.calibration import Calibrator, Node
from paceline.v1 import peer_pb2
from services.runtime.process import Process
from services.verifier.calibration import Calibrators, learn
from services.verifier.sequence import TargetSequence
from services.verifier.session import VerifySession
from services.verifier.specs import SequenceSpec
from tests.verifier.conductor import Conductor


def sequence(mode: VerifyMode, calibrators: Calibrators) -> TargetSequence:
    temperature = 0.0 if mode is VerifyMode.GREEDY else 1.0
    sampling = SamplingParams(temperature=temperature, seed=1, mode=mode)
    spec = SequenceSpec(1, 0, (1, 2, 3), sampling, 50, frozenset(), 16)
    made = TargetSequence(1, spec, VerifySession(asyncio.new_event_loop(), "test"), 200, 61)
    made.calibrator = calibrators.of(sampling.resolved_mode)
    return made


def taught(calibrators: Calibrators, mode: VerifyMode) -> Calibrator:
    """A drafter that says 90% and is right in a third."""
    calibrator = calibrators.of(mode)
    assert calibrator is not None
    for i in range(900):
        calibrator.observe([Node(-1, math.log(0.9), 0, 0.9, i % 3 == 0)])
    return calibrator


@pytest.mark.parametrize("mode", [VerifyMode.GREEDY, VerifyMode.COUPLED])
def test_claims_become_calibrated_confidences(mode: VerifyMode) -> None:
    calibrators = Calibrators("eagle3")
    taught(calibrators, mode)
    subject = sequence(mode, calibrators)
    subject.add_draft(DraftEntry(3, (7, 8, 9), (-1, -1, 0), (math.log(0.9), math.log(0.9), math.log(0.9))))
    tree = subject.choose_tree(8)
    assert tree.path_acceptances[0] == pytest.approx(1 / 3, abs=0.06)
    assert [claim and claim.position for claim in tree.claims] == [0, 0, 1]
    assert tree.claims[0] is not None
    assert tree.claims[0].log_prob == math.log(0.9)


def test_drawn_tokens_calibrate_only_the_confidence_stated_before_the_draw() -> None:
    calibrators = Calibrators("dspark")
    taught(calibrators, VerifyMode.REJECTION)
    said, silent = (SiblingDraws((7, 8), DrawRule.WITHOUT_REPLACEMENT, None, sure) for sure in (0.9, None))
    log_probs = (math.log(0.9), math.log(0.2))
    seen = []
    for draws in (said, silent):
        subject = sequence(VerifyMode.REJECTION, calibrators)
        subject.add_draft(DraftEntry(3, (7, 8), (-1, -1), log_probs, draft_dists=(draws, draws)))
        seen.append(subject.choose_tree(8))
    assert seen[0].path_acceptances == pytest.approx((1 / 3, 1 / 6), abs=0.06)
    assert learn(calibrators.of(VerifyMode.REJECTION), seen[0], (1,))[0] & 1
    assert seen[1].path_acceptances == (0.5, 0.25)
    assert learn(calibrators.of(VerifyMode.REJECTION), seen[1], (1,)) == ()


def test_block_verification_has_no_calibrator() -> None:
    calibrators, mode = Calibrators("eagle3"), VerifyMode.BLOCK
    for other in (VerifyMode.GREEDY, VerifyMode.COUPLED, VerifyMode.TYPICAL, VerifyMode.REJECTION):
        taught(calibrators, other)
    subject, plain = (sequence(mode, calibrators) for _ in range(2))
    plain.calibrator = None
    assert subject.calibrator is None
    entry = DraftEntry.chain(3, (7, 8), (math.log(0.9), math.log(0.5)))
    for one in (subject, plain):
        one.add_draft(entry)
    assert subject.choose_tree(8) == plain.choose_tree(8)


def test_entries_without_probabilities_or_with_confidences_stay_as_they_are() -> None:
    calibrators = Calibrators("eagle3")
    taught(calibrators, VerifyMode.GREEDY)
    silent, sure = (sequence(VerifyMode.GREEDY, calibrators) for _ in range(2))
    silent.add_draft(DraftEntry.chain(3, (7,)))
    assert silent.choose_tree(4).path_acceptances == (0.5,)
    sure.add_draft(DraftEntry.chain(3, (7,), (-0.1,), (0.25,)))
    assert sure.choose_tree(4).path_acceptances == (0.25,)


@pytest.mark.parametrize(
    "entry",
    [
        DraftEntry(3, (7, 8), (-1, 5), (-0.1, -0.1)),
        DraftEntry(3, (7, 8), (-1, 1), (-0.1, -0.1)),
        DraftEntry(3, (7, 8), (-1,), (-0.1, -0.1)),
        DraftEntry(3, (7, 8), (-1, 0), (-0.1,)),
        DraftEntry(3, (7,), (-1,), (math.nan,)),
        DraftEntry(3, (7,), (-1,), (1.0,)),
        DraftEntry(3, (99,), (-1,), (-1.0,)),
    ],
)
def test_malformed_entries_are_refused_as_before(entry: DraftEntry) -> None:
    calibrators = Calibrators("eagle3")
    for is_taught in (False, True):
        if is_taught:
            taught(calibrators, VerifyMode.GREEDY)
        with pytest.raises(DraftError):
            sequence(VerifyMode.GREEDY, calibrators).add_draft(entry)


def test_acceptance_samples_are_packed_by_node_and_fed_to_the_calibrator() -> None:
    calibrators = Calibrators("eagle3")
    subject = sequence(VerifyMode.GREEDY, calibrators)
    subject.add_draft(DraftEntry(3, (7, 8, 9), (-1, 0, 1), (math.log(0.8), math.log(0.4), math.log(0.6))))
    tree = subject.choose_tree(8)
    outcomes = learn(subject.calibrator, tree, (1,))
    assert [(o >> 17, o >> 9 & 255, o >> 1 & 255, o & 1) for o in outcomes] == [
        *((0, 204, 204, 1), (1, 102, 102, 0)),
    ]
    assert calibrators.errors()["greedy", "token"] == pytest.approx((0.2 + 0.4) / 2, abs=1e-4)
    assert set(calibrators.errors()) == {("greedy", kind) for kind in ("own", "token", "path")}
    assert learn(None, tree, ()) == ()


async def test_a_step_report_holds_acceptance_samples(verifier: Process, plain_text: Any) -> None:
    prompt = [3, 4, 5]
    text = plain_text(prompt, 40)
    async with Conductor(verifier.port) as conductor:
        sequence_id = await conductor.open(prompt, 40)
        for start in range(0, 36, 4):  # right, but for the last of each four
            tokens = [*text[start : start + 3], (text[start + 3] + 1) % 61]
            await conductor.send(
                drafts=peer_pb2.DraftBatch(
                    sequence_ids=[sequence_id],
                    epochs=[0],
                    starts=[len(prompt) + start],
                    sizes=[4],
                    tokens=tokens,
                    parents=[-1, 0, 1, 2],
                    log_probs=[math.log(0.5)] * 4,
                )
            )
        assert await conductor.finish(sequence_id) == [text]
    seen = 0
    for step in conductor.steps:
        assert len(step.num_acceptance_samples) == len(step.commits.sequence_ids)
        assert sum(step.num_acceptance_samples) == len(step.acceptance_samples)
        accepted = [outcome & 1 for outcome in step.acceptance_samples]
        assert sum(accepted) == sum(step.num_accepted_tokens)
        assert all(outcome >> 9 & 255 in (127, 128) for outcome in step.acceptance_samples)
        seen += len(accepted)
    assert seen > 0
