"""Choosing a step's draft nodes: by the budget at first, then by what steps have cost and drafts were worth."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest

from paceline.contract.policy import StepPolicy
from paceline.draft_tree import DraftTree
from paceline.drafts import DraftEntry
from paceline.sampling.params import SamplingParams, VerifyMode
from paceline.target import TargetEngine
from paceline.trie import DraftTrie
from paceline.v1 import target_pb2
from services.runtime import metrics
from services.verifier.budget import Basis, NodeBudget
from services.verifier.inbox import AddDrafts, Open, SetPolicy
from services.verifier.observer import StepObserver
from services.verifier.report import StepEvent
from services.verifier.specs import SequenceSpec
from tests.simulation.verifier import ListedSession, SteppedVerifier


def tree(*confidences: float) -> DraftTree:
    trie = DraftTrie([1])
    trie.add(DraftEntry.chain(1, tuple(range(2, 2 + len(confidences))), (), confidences))
    return trie.select_best(len(confidences), len(confidences))


def taught(*steps: tuple[int, float], budget: NodeBudget | None = None) -> NodeBudget:
    """A budget that has seen steps of these rows and seconds, and does not explore in its next ones."""
    budget = budget or NodeBudget()
    for _ in range(33):
        for rows, seconds in steps:
            budget.observe_step(rows, seconds)
    return budget


@given(
    st.lists(st.lists(st.floats(0.05, 1), min_size=1, max_size=6), min_size=1, max_size=6),
    st.integers(0, 40),
)
def test_without_a_curve_the_likeliest_within_the_budget_are_taken(
    chains: list[list[float]], max_nodes: int
) -> None:
    trees = [tree(*chain) for chain in chains]
    choice = NodeBudget().choose(trees, is_rejection=False, max_nodes=max_nodes)
    kept = [path_acceptance for t in choice.trees for path_acceptance in t.path_acceptances]
    left = [s for whole, t in zip(trees, choice.trees, strict=True) for s in whole.path_acceptances[len(t) :]]
    assert choice.basis is Basis.BUDGET
    assert len(kept) == choice.num_chosen == min(max_nodes, choice.num_offered)
    assert choice.num_offered == sum(map(len, trees))
    assert not kept or not left or min(kept) >= max(left)
    for whole, part in zip(trees, choice.trees, strict=True):
        assert part.tokens == whole.tokens[: len(part)]


def test_nodes_that_do_not_pay_are_left() -> None:
    budget = taught((1, 0.010), (2, 0.011), (4, 0.030), (8, 0.060))
    choice = budget.choose([tree(0.8, 0.8, 0.8, 0.8)], is_rejection=False, max_nodes=64)
    assert (choice.basis, choice.num_offered, choice.num_chosen) == (Basis.CURVE, 4, 1)
    assert choice.trees[0].tokens == (2,)
    # The same nodes beside a long wait per step, and beside rows that are run anyway.
    dear = budget.choose([tree(0.8, 0.8, 0.8, 0.8)], is_rejection=False, max_nodes=64, overhead_s=0.2)
    assert dear.num_chosen == 4
    assert budget.choose([tree(0.8, 0.8)], is_rejection=False, max_nodes=1).num_chosen == 1


def test_the_scan_stops_early_where_draws_are_verified() -> None:
    """A step of one node never pays here, one of two does: only without draws may the second be looked at."""
    budget = taught((1, 0.010), (2, 0.030), (3, 0.0301), (4, 0.0302))
    certain = [tree(1.0, 1.0, 1.0)]
    free, drawn = (budget.choose(certain, is_rejection=draws, max_nodes=64) for draws in (False, True))
    assert (free.basis, free.num_chosen) == (Basis.CURVE, 3)
    assert (drawn.basis, drawn.num_chosen) == (Basis.EARLY_STOP, 0)


def test_more_rows_than_were_measured_are_explored() -> None:
    budget = taught((1, 0.010), (2, 0.020))
    choice = budget.choose([tree(0.5, 0.5, 0.5)], is_rejection=False, max_nodes=64)
    assert (choice.basis, choice.num_chosen) == (Basis.BUDGET, 3)


def test_steps_that_became_cheap_are_found_again() -> None:
    budget = taught((1, 0.010), (2, 0.020), (4, 0.040))
    drafted = [tree(0.6, 0.6, 0.6)]
    assert budget.choose(drafted, is_rejection=False, max_nodes=64).num_chosen == 0
    rows = []
    for _ in range(64 * 40):
        chosen = budget.choose(drafted, is_rejection=False, max_nodes=64).num_chosen
        rows.append(1 + chosen)
        budget.observe_step(1 + chosen, 0.010 + 0.0001 * chosen)
    assert rows.count(4) >= 40
    assert rows[-64:].count(4) > 32


def test_promised_tokens_are_compared_with_accepted_tokens() -> None:
    budget = taught((1, 0.010), (2, 0.013), (4, 0.019))
    drafted = tree(0.9, 0.9, 0.9)
    assert budget.trust == 1
    assert budget.choose([drafted], is_rejection=False, max_nodes=64).num_chosen == 3
    for _ in range(400):
        budget.observe_draft(drafted, 0)
    assert budget.trust == 0.25
    assert budget.choose([drafted], is_rejection=False, max_nodes=64).num_chosen == 0
    for _ in range(2000):
        budget.observe_draft(drafted, 3)
    assert budget.trust == pytest.approx(3 / (0.9 + 0.81 + 0.729), rel=0.02)


def test_a_budget_that_does_not_learn_goes_by_the_policy() -> None:
    budget = taught((1, 0.01), (2, 1.0), (4, 9.0), budget=NodeBudget(learns=False))
    choice = budget.choose([tree(0.1, 0.1)], is_rejection=True, max_nodes=64)
    assert (choice.basis, choice.num_chosen) == (Basis.BUDGET, 2)


def test_nothing_offered_is_nothing_chosen() -> None:
    choice = NodeBudget().choose([DraftTree()], is_rejection=False, max_nodes=64)
    assert (choice.num_offered, choice.num_chosen) == (0, 0)
    assert choice.trees == [DraftTree()]


@pytest.mark.parametrize(
    ("mode", "basis"),
    [
        (VerifyMode.GREEDY, Basis.CURVE),
        (VerifyMode.COUPLED, Basis.CURVE),
        (VerifyMode.TYPICAL, Basis.CURVE),
        (VerifyMode.REJECTION, Basis.EARLY_STOP),
        (VerifyMode.BLOCK, Basis.EARLY_STOP),
    ],
)
def test_one_sequence_with_draws_decides_for_its_step(
    target_dir: Path, mode: VerifyMode, basis: Basis
) -> None:
    """In the real loop: one greedy sequence beside one of each mode; the choice and its figures are exported."""
    engine = TargetEngine.load(target_dir, dtype=torch.float32)
    budget = taught((1, 0.010), (2, 0.0101), (4, 0.0102), (8, 0.0103), (16, 0.0104))
    verifier, session = SteppedVerifier(engine, budget=budget), ListedSession()
    policy = StepPolicy(version=77, max_nodes_per_step=8, max_nodes_per_sequence=4)
    greedy = SamplingParams(temperature=0.0)
    other = greedy if mode is VerifyMode.GREEDY else SamplingParams(temperature=1.0, mode=mode)
    verifier.put(SetPolicy(policy))
    for key, sampling in ((1, greedy), (2, other)):
        spec = SequenceSpec(key, 0, (1, 2, 3, 4), sampling, 20, frozenset(), 8)
        verifier.put(Open(session, spec, None))
    verifier.step()  # the prompts
    for sequence in verifier.table.running:
        entry = DraftEntry.chain(sequence.committed_length, (7, 8, 9), (), (0.9, 0.9, 0.9))
        verifier.put(AddDrafts(session, ((sequence.sequence_id, 0, entry),), 0))
    observer = StepObserver(f"budget-{mode.value}", verifier.calibrators)
    verifier.step()
    stats = verifier.stats[-1]
    assert stats.choice is not None
    assert (stats.choice.basis, stats.choice.num_offered) == (basis, 6)
    assert stats.num_rows == 2 + stats.choice.num_chosen
    observer.observe(StepEvent(stats, [], [], [], target_pb2.DroppedDrafts(), 2))
    exported = generate_latest(metrics.REGISTRY).decode()
    labels = f'basis="{basis.value}",model_name="budget-{mode.value}"'
    assert f"paceline_draft_nodes_offered_total{{{labels}}} 6.0" in exported
    assert f"paceline_draft_nodes_chosen_total{{{labels}}} {float(stats.choice.num_chosen)}" in exported
    assert f'paceline_step_policy_version{{model_name="budget-{mode.value}"}} 77.0' in exported
