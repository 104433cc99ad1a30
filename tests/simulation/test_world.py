"""Text depends on prompt, parameters and target alone, whatever happens to drafts, slots, streams and neighbours.

Thousands of steps of the real parts under a simulated transport. The bugs planted at the end show that the comparison
can fail: each of them is one that speculative decoding is known for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from paceline.draft_tree import DraftTree
from paceline.sampling import verify
from paceline.target import TargetEngine
from paceline.target.kv.slot import Slot
from services.verifier.sequence import TargetSequence
from tests.simulation.busy import run_busy_world
from tests.simulation.kit import Kit
from tests.simulation.machine import WorldMachine
from tests.simulation.world import World

RUN = settings(
    max_examples=60,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
    report_multiple_bugs=False,
)
MUST_HAPPEN = (
    "accepted",
    "refused",
    "stale",
    "old epoch",
    "ahead",
    "delivered",
    "delivered again",
    "lost",
    "drafted by a real drafter",
    "drafted past an outcome",
    "hit",
    "n-gram accepted",
    "moved",
    "stream lost",
    "cancelled",
    "preempted",
    "prefix adopted",
    "prefix copied",
    "finished",
)


def test_text_is_the_plain_text_whatever_happens(kit: Kit) -> None:
    WorldMachine.kit, WorldMachine.totals = kit, Counter()
    run_state_machine_as_test(WorldMachine, settings=RUN)
    assert WorldMachine.totals["finished"] > 0
    assert WorldMachine.totals["accepted"] > 0
    assert WorldMachine.totals["tied"] <= WorldMachine.totals["finished"] // 100


def test_all_of_it_happens_in_a_busy_world(kit: Kit) -> None:
    events: Counter[str] = Counter()
    for seed, placements in enumerate(
        [("separate-eagle3", "colocated-independent"), ("separate-independent", "colocated-eagle3")]
    ):
        events += run_busy_world(kit, placements, seed)
    missing = [name for name in MUST_HAPPEN if not events[name]]
    assert not missing, f"never happened: {missing}"
    assert events["tied"] <= events["finished"] // 100


def test_all_of_it_happens_with_features_of_the_newest_position_alone(medusa_kit: Kit) -> None:
    """Sequences that move, lose their slots or start from a prefix need nothing older than their newest position."""
    events = run_busy_world(medusa_kit, ("separate-medusa1", "colocated-medusa1"), seed=7)
    missing = [name for name in MUST_HAPPEN if not events[name] and name != "drafted past an outcome"]
    assert not missing, f"never happened: {missing}"
    assert events["tied"] <= events["finished"] // 100


def test_drafts_that_land_during_a_pass_count_for_what_it_commits(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft for an outcome that arrives while the target runs is a cache hit; the next pass verifies its tokens."""
    world = World(kit, ("none", "none"), (0, 0))
    request = world.open(4, 0, 20, 8, 0, stops=False)
    while not request.tokens:
        world.step(0)
    run = kit.engines[0].step

    def step(batch: Any, **options: Any) -> Any:
        output = run(batch, **options)
        world.traffic.draft_by_script(
            request, 0, 6, [], 0, 0
        )  # five tokens and the one that this pass commits
        world.traffic.deliver(0)
        return output

    monkeypatch.setattr(kit.engines[0], "step", step)
    world.step(0)
    assert world.events["hit"] == 1
    monkeypatch.undo()
    before = len(request.tokens)
    world.step(0)
    assert len(request.tokens) == before + 6
    world.run_out()


def _accept_the_first_child(tree: DraftTree, choices: Sequence[int]) -> Any:
    """A verifier that believes its drafter."""
    if len(tree) and 0 in tree.parents:
        choices = [tree.tokens[0], *choices[1:]]
    return verify.walk(tree, choices)


def _keep_without_moving(slot: Slot, row_indices: Sequence[int]) -> None:
    """Accepted rows stay where they were run, behind rejected ones."""
    slot.length += len(row_indices)
    slot.num_pending = 0


def _fork_one_too_many(original: Callable[..., int]) -> Callable[..., int]:
    """A copied prefix whose last row belongs to the other text."""

    def fork(engine: TargetEngine, slot: int, length: int, capacity_tokens: int = 0) -> int:
        copy = original(engine, slot, length, capacity_tokens)
        rows = engine.cache.get(copy).storage
        rows[:, :, length - 1] = rows[:, :, 0]
        return copy

    return fork


def _forget_what_is_cached(original: Callable[..., Any]) -> Callable[..., Any]:
    """After a stop of its drafts, a sequence's root is run as if it were one position further."""

    def commit(sequence: TargetSequence, tokens: Sequence[int], **how: bool) -> Any:
        outcome = original(sequence, tokens, **how)
        if len(tokens) > 2:
            sequence.committed[-1], sequence.committed[-2] = sequence.committed[-2], sequence.committed[-1]
        return outcome

    return commit


@pytest.mark.parametrize("bug", ["believes drafts", "rows not moved", "prefix too long", "tokens swapped"])
def test_a_planted_bug_is_found(kit: Kit, monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    if bug == "believes drafts":
        monkeypatch.setattr("paceline.sampling.batch.walk", _accept_the_first_child)
    elif bug == "rows not moved":
        monkeypatch.setattr(Slot, "keep", _keep_without_moving)
    elif bug == "prefix too long":
        monkeypatch.setattr(TargetEngine, "fork", _fork_one_too_many(TargetEngine.fork))
    else:
        monkeypatch.setattr(TargetSequence, "commit", _forget_what_is_cached(TargetSequence.commit))
    with pytest.raises(AssertionError, match="is not the plain one"):
        run_busy_world(kit, ("separate-independent", "none"), seed=1)
