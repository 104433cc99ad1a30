"""Requests and the sequences that carry them.

Responsible for: the state of each request (with its table of legal transitions), the translation between a
request, its key, the verifier's sequence id and the two epochs, and its figures. Deliberately does not know
streams or clocks. Used by orchestrator.cycles, which alone changes states.
"""

from __future__ import annotations

import enum
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from orchestrator.commit_log import CommitLogEntry
from orchestrator.drafter_link import DrafterLink
from orchestrator.output_queue import OutputQueue
from orchestrator.placement import ANY_DRAFTER, DrafterRequirement
from paceline.v1 import generation_pb2, sampling_pb2

MAX_DRAFT_NODES = 64
"""Most draft nodes that one sequence may have in one step."""


class ConductorSequenceState(enum.Enum):
    """Where a request stands."""

    PENDING = "pending"
    """Waits for a verifier: new, or its verifier was lost."""
    OPENING = "opening"
    """OpenSequence was sent."""
    RUNNING = "running"
    """The verifier has named it."""
    FINISHED = "finished"
    """Its ending is in the output queue."""


TRANSITIONS: dict[ConductorSequenceState, frozenset[ConductorSequenceState]] = {
    ConductorSequenceState.PENDING: frozenset(
        {ConductorSequenceState.OPENING, ConductorSequenceState.FINISHED}
    ),
    ConductorSequenceState.OPENING: frozenset(
        {ConductorSequenceState.RUNNING, ConductorSequenceState.PENDING, ConductorSequenceState.FINISHED}
    ),
    ConductorSequenceState.RUNNING: frozenset(
        {ConductorSequenceState.PENDING, ConductorSequenceState.FINISHED}
    ),
    ConductorSequenceState.FINISHED: frozenset(),
}


class IllegalTransitionError(RuntimeError):
    """A change of state that the table does not allow: a bug of ours."""


@dataclass(slots=True)
class SequenceStats:
    """Figures of one request; constant work per commit.

    Attributes:
        num_passes: target passes that committed at least one token.
        num_draft_tokens: draft tokens verified.
        num_accepted_tokens: draft tokens accepted.
        depths: passes by depth of the verified tree.
        accepted: passes by number of accepted draft tokens.
    """

    num_passes: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    depths: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)

    def add(self, num_draft_tokens: int, depth: int, num_accepted: int) -> None:
        """Counts one commit."""
        self.num_passes += 1
        if num_draft_tokens or depth:
            self.num_draft_tokens += num_draft_tokens
            self.num_accepted_tokens += num_accepted
            self.depths[depth] += 1
            self.accepted[num_accepted] += 1


def passes_per_position(by_depth: Counter[int]) -> list[int]:
    """From "passes by depth" to "passes that reached depth i + 1"."""
    counts = [0] * max(by_depth, default=0)
    for depth, passes in by_depth.items():
        for position in range(depth):
            counts[position] += passes
    return counts


@dataclass(slots=True)
class Attachment:
    """One drafter that has a sequence open.

    Attributes:
        link: the drafter.
        epoch: its epoch of the sequence.
        partition: of the outcomes that several drafters share, which this one's is; share 0 also makes the drafts.
        length: tokens of the text that it has been told.
    """

    link: DrafterLink
    epoch: int
    partition: int
    length: int


@dataclass(slots=True)
class Drafting:
    """The drafters' side of one sequence.

    Attributes:
        attachments: the drafters that have it open, by share.
        num_partitions: how many drafters its outcomes are shared out to, whether or not all of them are there.
        requirement: what the request asks of its drafter.
        is_off: no drafter is to have it any more (asked for by the request, or past its positions).
        num_reopens: openings in a row that failed; sets the delay of the next.
        retry_at: loop time before which it is not opened again.
        is_past_outcome: the next step verifies what a drafter made past this one's outcome.
    """

    attachments: dict[int, Attachment] = field(default_factory=dict)
    num_partitions: int = 1
    requirement: DrafterRequirement = ANY_DRAFTER
    is_off: bool = False
    num_reopens: int = 0
    retry_at: float = 0.0
    is_past_outcome: bool = False

    @property
    def reads_features(self) -> bool:
        """Whether a drafter that has it reads features, and so drafts past outcomes on its own outputs."""
        return any(attachment.link.reads_features for attachment in self.attachments.values())

    def at(self, link: DrafterLink) -> Attachment | None:
        """The attachment to a drafter."""
        return next((a for a in self.attachments.values() if a.link is link), None)

    @property
    def missing_partitions(self) -> list[int]:
        """Shares that no drafter has; the first is the one that matters most."""
        return [partition for partition in range(self.num_partitions) if partition not in self.attachments]


@dataclass(slots=True, eq=False)
class Sequence:
    """One request on its way through a verifier.

    Attributes:
        entry: its text.
        sampling: how tokens are chosen.
        max_new_tokens: most tokens to generate, resumed ones included.
        stop_token_ids: tokens that end it.
        max_draft_nodes: most draft nodes in one step; 0 is plain decoding.
        max_draft_tokens: most draft tokens per entry.
        log_probs: which log-probabilities the request wants.
        tenant: whose it is, for statistics; may be empty.
        num_prompt_log_probs: prompt tokens, from the second one on, whose log-probabilities have come in.
        started_at: loop time of Run.
        pending_since: loop time at which it last began to wait for a verifier.
        not_before: loop time before which it is not opened at the verifier.
        key: names its last OpenSequence.
        sequence_id: the verifier's id, 0 while there is none.
        epoch: the verifier's epoch.
    """

    entry: CommitLogEntry
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
    counts: SequenceStats = field(default_factory=SequenceStats)
    num_streamed_before: int = 0

    def move_to(self, state: ConductorSequenceState) -> None:
        """Changes the state.

        Raises:
            IllegalTransitionError: if the table does not allow it.
        """
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransitionError(f"{self.entry.request_id}: {self.state.value} -> {state.value}")
        self.state = state

    @property
    def has_streamed(self) -> bool:
        """Whether this Run has handed out a token."""
        return self.first_token_at is not None

    @property
    def open_log_probs(self) -> sampling_pb2.LogProbOptions:
        """What is still wanted of a verifier: the prompt's come from one opening alone."""
        options = sampling_pb2.LogProbOptions()
        options.CopyFrom(self.log_probs)
        if self.num_prompt_log_probs >= self.entry.num_prompt_tokens - 1:
            options.ClearField("num_prompt_top")
        return options

    def stats(self) -> generation_pb2.GenerationStats:
        """Figures so far, as sent in the last frame."""
        first, last = self.first_token_at, self.last_token_at
        return generation_pb2.GenerationStats(
            num_prompt_tokens=self.entry.num_prompt_tokens,
            num_generated_tokens=self.entry.num_generated_tokens,
            num_target_passes=self.counts.num_passes,
            num_draft_tokens=self.counts.num_draft_tokens,
            num_accepted_tokens=self.counts.num_accepted_tokens,
            drafted_per_position=passes_per_position(self.counts.depths),
            accepted_per_position=passes_per_position(self.counts.accepted),
            time_to_first_token_us=0 if first is None else int((first - self.started_at) * 1e6),
            decode_us=0 if first is None or last is None else int((last - first) * 1e6),
        )


class ConductorSequences:
    """All unfinished sequences of one conductor, by key and by the verifier's id."""

    def __init__(self) -> None:
        self._all: dict[str, Sequence] = {}
        self._by_key: dict[int, Sequence] = {}
        self._by_id: dict[int, Sequence] = {}
        self._keys = itertools.count(1)

    def add(self, sequence: Sequence) -> None:
        """Takes up a new sequence."""
        self._all[sequence.entry.request_id] = sequence

    def name_key(self, sequence: Sequence) -> int:
        """Gives the sequence a fresh key for an OpenSequence; the old one is forgotten."""
        self._by_key.pop(sequence.key, None)
        sequence.key = next(self._keys) & 0xFFFFFFFF or next(self._keys) & 0xFFFFFFFF
        self._by_key[sequence.key] = sequence
        return sequence.key

    def name_id(self, sequence: Sequence, sequence_id: int) -> None:
        """Notes the verifier's id."""
        sequence.sequence_id = sequence_id
        self._by_id[sequence_id] = sequence

    def forget_id(self, sequence: Sequence) -> None:
        """Drops key and id: the verifier has it no more."""
        self._by_key.pop(sequence.key, None)
        if self._by_id.get(sequence.sequence_id) is sequence:
            del self._by_id[sequence.sequence_id]
        sequence.sequence_id = 0

    def remove(self, sequence: Sequence) -> None:
        """Drops the sequence."""
        self.forget_id(sequence)
        self._all.pop(sequence.entry.request_id, None)

    def by_key(self, key: int) -> Sequence | None:
        """The sequence whose OpenSequence had this key."""
        return self._by_key.get(key)

    def by_id(self, sequence_id: int) -> Sequence | None:
        """The sequence that the verifier calls so."""
        return self._by_id.get(sequence_id)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(list(self._all.values()))

    def __len__(self) -> int:
        return len(self._all)
