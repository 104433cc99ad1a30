"""Requests in the conductor: commit logs, states, the table that finds them, statistics."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.commit_log import CommitGapError, CommitLog
from orchestrator.sequence_state import TRANSITIONS, ConductorSequenceState
from orchestrator.sequence_stats import SequenceStats, passes_per_position
from orchestrator.sequences import ConductorSequences, Sequence
from paceline.contract.errors import (
    IllegalTransitionError,
)
from paceline.v1 import sampling_pb2


def sequence(request_id: str = "r") -> Sequence:
    return Sequence(
        request_id=request_id,
        commit_log=CommitLog([1, 2]),
        sampling=sampling_pb2.SamplingParams(),
        max_new_tokens=4,
        stop_token_ids=(),
        max_draft_nodes=8,
        max_draft_tokens=8,
        started_at=0.0,
        pending_since=0.0,
    )


@given(
    text=st.lists(st.integers(0, 50), min_size=2, max_size=30),
    cuts=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 8)), max_size=20),
)
def test_a_commit_log_holds_a_prefix_of_the_text_whatever_is_repeated(
    text: list[int], cuts: list[tuple[int, int]]
) -> None:
    commit_log = CommitLog(text[:1])
    for start, size in cuts:
        span = text[start : start + size]
        known = len(commit_log.tokens)
        if start > known:
            with pytest.raises(CommitGapError):
                commit_log.append(start, span)
        else:
            new_tokens = commit_log.append(start, span)
            assert list(new_tokens) == text[known : known + len(new_tokens)]
        assert commit_log.tokens == text[: len(commit_log.tokens)]
        assert len(commit_log.tokens) >= known


def test_a_commit_log_counts_resumed_tokens_as_generated() -> None:
    commit_log = CommitLog([1, 2, 3, 4], num_resumed_tokens=2)
    assert (commit_log.num_prompt_tokens, commit_log.num_generated_tokens) == (2, 2)


def test_the_table_refuses_a_request_twice() -> None:
    sequences = ConductorSequences()
    sequences.add(sequence("r"))
    with pytest.raises(ValueError, match="running already"):
        sequences.add(sequence("r"))


@pytest.mark.parametrize("state", list(ConductorSequenceState))
def test_only_transitions_of_the_table_are_allowed(state: ConductorSequenceState) -> None:
    for target in ConductorSequenceState:
        subject = sequence()
        subject.state = state
        if target in TRANSITIONS[state]:
            subject.move_to(target)
            assert subject.state is target
        else:
            with pytest.raises(IllegalTransitionError):
                subject.move_to(target)


def test_table_forgets_old_keys_and_ids() -> None:
    sequences, subject = ConductorSequences(), sequence()
    sequences.add(subject)
    first = sequences.assign_key(subject)
    second = sequences.assign_key(subject)
    assert sequences.by_key(first) is None
    assert sequences.by_key(second) is subject
    sequences.assign_id(subject, 7)
    sequences.forget_id(subject)
    assert sequences.by_id(7) is None
    assert sequences.by_key(second) is None
    assert len(sequences) == 1
    sequences.remove(subject)
    assert len(sequences) == 0


@given(st.lists(st.integers(0, 9), max_size=40))
def test_passes_per_position_counts_those_that_reached_it(depths: list[int]) -> None:
    counts = passes_per_position(Counter(depths))
    assert counts == [sum(depth > position for depth in depths) for position in range(max(depths, default=0))]


def test_stats_leave_plain_passes_out_of_positions() -> None:
    stats = SequenceStats()
    stats.add(0, 0, 0)
    stats.add(5, 3, 1)
    assert (stats.num_passes, stats.num_draft_tokens, stats.num_accepted_tokens) == (2, 5, 1)
    assert passes_per_position(stats.depths) == [1, 1, 1]
    assert passes_per_position(stats.accepted) == [1]
