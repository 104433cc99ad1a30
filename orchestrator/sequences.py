"""Requests as the conductor runs them, and the table that finds them.

Responsible for: the state of each request, and the way from a request id, from the key of an opening and from the
verifier's sequence id to the request. Deliberately does not know streams or clocks. States are changed by
orchestrator.sequence_lifecycle alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from orchestrator.commit_log import CommitLog
from orchestrator.drafting import Drafting
from orchestrator.output_queue import OutputQueue
from orchestrator.sequence_state import TRANSITIONS, ConductorSequenceState
from orchestrator.sequence_stats import SequenceStats, passes_per_position
from paceline.contract.errors import IllegalTransitionError
from paceline.v1 import generation_pb2, sampling_pb2


@dataclass(slots=True, eq=False)
class Sequence:
    """One request on its way through a verifier.

    Attributes:
        request_id: names the request; the director issues it.
        commit_log: its text.
        sampling: how tokens are chosen.
        max_new_tokens: most tokens to generate, resumed ones included.
        stop_token_ids: tokens that end the text.
        max_draft_nodes: most draft nodes in one step; 0 is plain decoding.
        max_draft_tokens: most draft tokens in one draft entry.
        started_at: loop time of Run.
        pending_since: loop time at which the request last began to wait for a verifier.
        log_probs: the log-probabilities that the request wants.
        tenant: whose request it is, for statistics; may be empty.
        num_prompt_log_probs: prompt tokens, from the second one on, whose log-probabilities have come in.
        not_before: loop time before which the request is not opened at a verifier.
        key: names the last OpenSequence; the conductor issues it.
        sequence_id: the verifier's id, 0 while there is none.
        epoch: the verifier's epoch.
        num_resumes: openings at a verifier after the first.
        first_token_at: loop time of the first token, None before it.
        last_token_at: loop time of the newest token, None before the first.
        state: see `ConductorSequenceState`.
        drafting: the drafters' side.
        output_queue: tokens on their way to the reader.
        stats: target passes and draft tokens so far.
    """

    request_id: str
    commit_log: CommitLog
    sampling: sampling_pb2.SamplingParams
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    max_draft_nodes: int
    max_draft_tokens: int
    started_at: float
    pending_since: float
    log_probs: sampling_pb2.LogProbOptions = field(default_factory=sampling_pb2.LogProbOptions)
    tenant: str = ""
    num_prompt_log_probs: int = 0
    not_before: float = 0.0
    key: int = 0
    sequence_id: int = 0
    epoch: int = 0
    num_resumes: int = 0
    first_token_at: float | None = None
    last_token_at: float | None = None
    state: ConductorSequenceState = ConductorSequenceState.PENDING
    drafting: Drafting = field(default_factory=Drafting)
    output_queue: OutputQueue = field(default_factory=OutputQueue)
    stats: SequenceStats = field(default_factory=SequenceStats)

    def move_to(self, state: ConductorSequenceState) -> None:
        """Changes the state.

        Raises:
            IllegalTransitionError: the table of transitions does not allow it.
        """
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransitionError(f"request {self.request_id}: {self.state.value} -> {state.value}")
        self.state = state

    @property
    def has_streamed(self) -> bool:
        """Whether this Run has handed out a token."""
        return self.first_token_at is not None

    @property
    def missing_log_probs(self) -> sampling_pb2.LogProbOptions:
        """The log-probabilities to ask a verifier for: those of the prompt only until all of them have come in."""
        options = sampling_pb2.LogProbOptions()
        options.CopyFrom(self.log_probs)
        if self.num_prompt_log_probs >= self.commit_log.num_prompt_tokens - 1:
            options.ClearField("num_prompt_top")
        return options

    def generation_stats(self) -> generation_pb2.GenerationStats:
        """Statistics so far, as sent with every frame."""
        first, last = self.first_token_at, self.last_token_at
        had_no_drafts = self.stats.num_passes > 1 and not self.stats.num_draft_tokens
        return generation_pb2.GenerationStats(
            num_prompt_tokens=self.commit_log.num_prompt_tokens,
            num_generated_tokens=self.commit_log.num_generated_tokens,
            num_target_passes=self.stats.num_passes,
            num_draft_tokens=self.stats.num_draft_tokens,
            num_accepted_tokens=self.stats.num_accepted_tokens,
            drafted_per_position=passes_per_position(self.stats.depths),
            accepted_per_position=passes_per_position(self.stats.accepted),
            time_to_first_token_us=0 if first is None else int((first - self.started_at) * 1e6),
            decode_us=0 if first is None or last is None else int((last - first) * 1e6),
            no_draft_reason=self.drafting.no_draft_reason if had_no_drafts else None,
        )


class ConductorSequences:
    """All unfinished sequences of one conductor, by request id, by key and by the verifier's id."""

    def __init__(self) -> None:
        self._by_request_id: dict[str, Sequence] = {}
        self._by_key: dict[int, Sequence] = {}
        self._by_id: dict[int, Sequence] = {}
        self._keys = itertools.count(1)

    def add(self, sequence: Sequence) -> None:
        """Adds a new sequence.

        Raises:
            ValueError: a request with this id is unfinished.
        """
        if sequence.request_id in self._by_request_id:
            raise ValueError(f"request {sequence.request_id} is running already")
        self._by_request_id[sequence.request_id] = sequence

    def assign_key(self, sequence: Sequence) -> int:
        """Gives the sequence a fresh key for an OpenSequence; the old key is forgotten."""
        self._by_key.pop(sequence.key, None)
        sequence.key = next(self._keys) & 0xFFFFFFFF or next(self._keys) & 0xFFFFFFFF
        self._by_key[sequence.key] = sequence
        return sequence.key

    def assign_id(self, sequence: Sequence, sequence_id: int) -> None:
        """Stores the id that the verifier gave the sequence."""
        sequence.sequence_id = sequence_id
        self._by_id[sequence_id] = sequence

    def forget_id(self, sequence: Sequence) -> None:
        """Drops key and id: the verifier no longer has the sequence."""
        self._by_key.pop(sequence.key, None)
        if self._by_id.get(sequence.sequence_id) is sequence:
            del self._by_id[sequence.sequence_id]
        sequence.sequence_id = 0

    def remove(self, sequence: Sequence) -> None:
        """Drops the sequence."""
        self.forget_id(sequence)
        self._by_request_id.pop(sequence.request_id, None)

    def by_key(self, key: int) -> Sequence | None:
        """The sequence whose OpenSequence had this key."""
        return self._by_key.get(key)

    def by_id(self, sequence_id: int) -> Sequence | None:
        """The sequence with this id at the verifier."""
        return self._by_id.get(sequence_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_request_id

    def __iter__(self) -> Iterator[Sequence]:
        return iter(list(self._by_request_id.values()))

    def __len__(self) -> int:
        return len(self._by_request_id)
