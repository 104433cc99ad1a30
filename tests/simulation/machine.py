"""A hypothesis state machine: every event that can happen in a world, in any order."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from paceline.contract.policy import StepPolicy
from tests.simulation.kit import MAX_ENTRY_TOKENS, MAX_NEW_TOKENS, SAMPLINGS, Kit, Placement
from tests.simulation.world import World

PLACEMENTS: tuple[Placement, ...] = (
    "separate-eagle3",
    "separate-independent",
    "colocated-eagle3",
    "colocated-independent",
    "none",
)
NUM_PROMPTS = 13
# The longest text, its drafts and the step to the next capacity fit into the smallest limit.
KV_LIMITS = (None, 768, 384, 256)

placements = st.sampled_from(PLACEMENTS)
prefix_bytes = st.sampled_from([0, 1 << 20, 300_000])
ngram_lengths = st.sampled_from([0, 4, 12])
index = st.integers(0, 1000)
peer_index = st.integers(0, 1)


class WorldMachine(RuleBasedStateMachine):
    """Rules over a world; each sequence's text is compared as it is committed.

    Attributes:
        kit: set before a run.
        totals: events of all examples since they were cleared.
    """

    kit: ClassVar[Kit]
    totals: ClassVar[Counter[str]] = Counter()
    world: World

    @initialize(
        first=placements,
        second=placements,
        first_bytes=prefix_bytes,
        second_bytes=prefix_bytes,
        tokens=st.tuples(ngram_lengths, ngram_lengths),
        data=st.data(),
    )
    def begin(
        self,
        first: Placement,
        second: Placement,
        first_bytes: int,
        second_bytes: int,
        tokens: tuple[int, int],
        data: Any,
    ) -> None:
        self.world = World(self.kit, (first, second), (first_bytes, second_bytes), tokens)
        for at in range(2):
            self.world.peers[at].verifier.limit_kv(data.draw(st.sampled_from(KV_LIMITS)))

    @rule(
        prompt=st.integers(0, NUM_PROMPTS - 1),
        sampling=st.integers(0, len(SAMPLINGS) - 1),
        max_new_tokens=st.integers(1, MAX_NEW_TOKENS),
        max_draft_nodes=st.sampled_from([0, 1, 4, 16]),
        at=peer_index,
        stops=st.booleans(),
        copies=st.sampled_from([1, 1, 1, 4, 16]),
    )
    def open(self, copies: int, prompt: int, **fields: Any) -> None:
        if len(self.world.open_requests) + copies <= 20:
            for copy in range(copies):
                self.world.open((prompt + copy) % NUM_PROMPTS, **fields)

    @rule(at=peer_index, count=st.integers(1, 6))
    def step(self, at: int, count: int) -> None:
        for _ in range(count):
            self.world.step(at)

    @rule(
        at=peer_index,
        nodes=st.integers(0, 16),
        per_step=st.sampled_from([1, 8, 64]),
        prefill=st.integers(1, 64),
        colocated=st.integers(0, 16),
    )
    def set_policy(self, at: int, nodes: int, per_step: int, prefill: int, colocated: int) -> None:
        policy = StepPolicy(
            version=1,
            max_nodes_per_step=per_step,
            max_nodes_per_sequence=nodes,
            wait_budget_us=0,
            max_prefill_tokens_per_step=prefill,
            draft_length=colocated,
        )
        self.world.set_policy(at, policy)

    @precondition(lambda self: self.world.open_requests)
    @rule(
        which=index,
        offset=st.integers(-6, 8),
        length=st.integers(1, MAX_ENTRY_TOKENS),
        spoilt=st.sets(st.integers(0, MAX_ENTRY_TOKENS - 1), max_size=2),
        branches=st.integers(0, 3),
        age=st.sampled_from([0, 0, 1]),
        at_once=st.booleans(),
    )
    def draft_by_script(self, which: int, at_once: bool, spoilt: set[int], **fields: Any) -> None:
        requests = self.world.open_requests
        num_before = len(self.world.traffic.messages)
        self.world.traffic.draft_by_script(requests[which % len(requests)], spoilt=sorted(spoilt), **fields)
        if at_once and len(self.world.traffic.messages) > num_before:
            self.world.traffic.deliver(num_before)

    @rule(at=peer_index, num_tokens=st.integers(1, 16), max_nodes=st.integers(1, 16), at_once=st.booleans())
    def draft_remotely(self, at: int, num_tokens: int, max_nodes: int, at_once: bool) -> None:
        num_before = len(self.world.traffic.messages)
        self.world.traffic.draft(at, num_tokens, max_nodes)
        while at_once and len(self.world.traffic.messages) > num_before:
            self.world.traffic.deliver(num_before)

    @rule(
        at=peer_index,
        num_tokens=st.integers(1, 8),
        max_outcomes=st.integers(1, 16),
        num_partitions=st.integers(1, 3),
        at_once=st.booleans(),
    )
    def draft_past_outcomes(self, at: int, at_once: bool, **fields: int) -> None:
        num_before = len(self.world.traffic.messages)
        self.world.traffic.draft_past_outcomes(at, **fields)
        while at_once and len(self.world.traffic.messages) > num_before:
            self.world.traffic.deliver(num_before)

    @precondition(lambda self: self.world.traffic.messages)
    @rule(which=index)
    def deliver(self, which: int) -> None:
        self.world.traffic.deliver(which % len(self.world.traffic.messages))

    @precondition(lambda self: self.world.traffic.messages)
    @rule(which=index)
    def deliver_and_keep(self, which: int) -> None:
        self.world.traffic.deliver(which % len(self.world.traffic.messages), keep=True)

    @precondition(lambda self: self.world.traffic.messages)
    @rule(which=index)
    def lose(self, which: int) -> None:
        self.world.traffic.lose(which % len(self.world.traffic.messages))

    @precondition(lambda self: self.world.open_requests)
    @rule(which=index, at=peer_index)
    def move(self, which: int, at: int) -> None:
        requests = self.world.open_requests
        self.world.move(requests[which % len(requests)], at)

    @precondition(lambda self: len(self.world.open_requests) > 2)
    @rule(which=index)
    def cancel(self, which: int) -> None:
        requests = self.world.open_requests
        self.world.cancel(requests[which % len(requests)])

    @rule(at=peer_index)
    def preempt(self, at: int) -> None:
        self.world.preempt(at)

    @rule(at=peer_index)
    def lose_stream(self, at: int) -> None:
        self.world.lose_stream(at)

    @rule(at=peer_index, limit=st.sampled_from(KV_LIMITS))
    def limit_kv(self, at: int, limit: int | None) -> None:
        self.world.peers[at].verifier.limit_kv(limit)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self.world.run_out()
        except BaseException:
            self.world.abandon()
            raise
        self.totals.update(self.world.events)
