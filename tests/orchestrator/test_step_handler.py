"""The stages of a step report: drafters before readers, and what a commit that leaves a gap costs."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, cast

import pytest

from orchestrator.counters import Counters
from orchestrator.draft_dispatcher import DraftDispatcher
from orchestrator.drafter_link import DrafterLink
from orchestrator.output_queue import Ending, OutputQueue
from orchestrator.policy import PolicyInForce
from orchestrator.reports import Reports
from orchestrator.sequence_lifecycle import Patience, SequenceLifecycle
from orchestrator.sequence_state import ConductorSequenceState
from orchestrator.sequences import ConductorSequences, Sequence
from orchestrator.step_handler import StepHandler
from orchestrator.verifier_link import VerifierLink
from paceline.contract.policy import PolicyOverrides
from paceline.v1 import peer_pb2, sampling_pb2, target_pb2
from tests.orchestrator.conftest import run_request
from tests.orchestrator.scripted_peers import peer_info

PROMPT = [5, 6, 7]


class RecordingVerifier:
    """Stands for the verifier's link."""

    is_up = True
    last_reason = ""
    feature_endpoint = "verifier:1"

    def __init__(self) -> None:
        self.info = peer_info("verifier")
        self.opens: list[target_pb2.OpenSequence] = []
        self.closes: list[int] = []

    def open(self, opening: target_pb2.OpenSequence) -> None:
        self.opens.append(opening)

    def close(self, sequence_id: int) -> None:
        self.closes.append(sequence_id)

    def note_work(self) -> None:
        pass


class RecordingDrafter:
    """Stands for a drafter's link."""

    is_up, is_stalled, num_sequences, reads_features, endpoint = True, False, 0, False, "drafter:1"

    def __init__(self, events: list[str]) -> None:
        self.info = peer_info("drafter", method="eagle3")
        self._events = events

    def open(self, opening: object) -> None:
        pass

    def close(self, sequence_id: int) -> None:
        pass

    def commit(self, commits: peer_pb2.CommitBatch) -> None:
        self._events.append(f"commits {list(commits.sequence_ids)} {list(commits.tokens)}")


class RecordingQueue(OutputQueue):
    """Notes when the reader is woken."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self._events = events
        self.endings: list[Ending] = []

    def wake(self) -> None:
        self._events.append("reader woken")

    def end(self, ending: Ending) -> None:
        self.endings.append(ending)


class Parts:
    """A step handler with two running sequences, ids 1 and 2."""

    def __init__(self, **patience: float) -> None:
        self.now = 0.0
        self.events: list[str] = []
        self.counters = Counters()
        self.verifier = RecordingVerifier()
        verifier, sequences = cast(VerifierLink, self.verifier), ConductorSequences()
        policy, reports = PolicyInForce(PolicyOverrides()), Reports(lambda: None)
        shared: dict[str, Any] = {
            "sequences": sequences,
            "verifier": verifier,
            "reports": reports,
            "counters": self.counters,
            "clock": lambda: self.now,
        }
        dispatcher = DraftDispatcher(policy=policy, **shared)
        dispatcher.links = (cast(DrafterLink, RecordingDrafter(self.events)),)
        self.lifecycle = SequenceLifecycle(
            dispatcher=dispatcher,
            patience=Patience(**patience),  # type: ignore[arg-type]
            placement=lambda: "separate",
            **shared,
        )
        self.steps = StepHandler(lifecycle=self.lifecycle, dispatcher=dispatcher, policy=policy, **shared)
        self.one, self.two = self._run(1), self._run(2)

    def _run(self, sequence_id: int) -> Sequence:
        sequence = self.lifecycle.begin(run_request(PROMPT, 100), 8)
        sequence.output_queue = RecordingQueue(self.events)
        self.lifecycle.opened(target_pb2.SequenceOpened(key=sequence.key, sequence_id=sequence_id))
        return sequence

    def step(self, *starts: int, reasons: Seq[int] = (0, 0)) -> None:
        """A step that commits token 9 at these positions."""
        num = len(starts)
        self.steps.handle(
            target_pb2.StepReport(
                commits=peer_pb2.CommitBatch(
                    sequence_ids=range(1, num + 1),
                    epochs=[0] * num,
                    starts=starts,
                    sizes=[1] * num,
                    tokens=[9] * num,
                ),
                num_draft_tokens=[0] * num,
                draft_depths=[0] * num,
                num_accepted_tokens=[0] * num,
                finish_reasons=cast(Any, reasons),
            )
        )


def test_drafters_get_the_commits_of_all_before_a_reader_is_woken() -> None:
    parts = Parts()
    parts.step(3, 3)
    assert parts.events == ["commits [1, 2] [9, 9]", "reader woken", "reader woken"]
    assert parts.one.commit_log.tokens == [*PROMPT, 9]


def test_drafters_hear_no_more_of_a_sequence_that_ends() -> None:
    parts = Parts()
    parts.step(3, 3, reasons=(sampling_pb2.FINISH_REASON_STOP, 0))
    assert parts.events == ["commits [2] [9]", "reader woken", "reader woken"]
    assert parts.one.state is ConductorSequenceState.FINISHED
    assert parts.lifecycle.num_running == 1


def test_a_gap_opens_the_sequence_again_with_the_text_it_has() -> None:
    parts = Parts()
    parts.step(5, 3)
    assert parts.verifier.closes == [1]
    opening = parts.verifier.opens[-1]
    assert (list(opening.prompt_token_ids), opening.epoch) == (PROMPT, 1)
    assert parts.two.commit_log.tokens == [*PROMPT, 9]
    assert parts.counters.num_committed_tokens == 1


@pytest.mark.parametrize("age_s", [0.0, 100.0])
def test_a_gap_too_many_ends_the_request_once(age_s: float) -> None:
    parts = Parts(max_resumes=0, resume_timeout_s=60.0)
    parts.now = age_s
    parts.step(5, 3)
    queue = cast(RecordingQueue, parts.one.output_queue)
    assert [ending.finish_reason for ending in queue.endings] == [sampling_pb2.FINISH_REASON_ERROR]
    assert parts.lifecycle.num_running == 1
    assert parts.two.commit_log.tokens == [*PROMPT, 9]


def test_commits_of_old_epochs_are_counted_and_dropped() -> None:
    parts = Parts()
    parts.one.epoch = 1
    parts.step(3, 3)
    assert parts.one.commit_log.tokens == PROMPT
    assert (parts.counters.num_stale_commits, parts.counters.num_steps) == (1, 1)
