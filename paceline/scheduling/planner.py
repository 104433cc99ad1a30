"""The best way to speculate under the cost model, and the policy that carries it out.

Responsible for: the search over lengths, waiting, outcomes and tokens past each of them; node budget and reason.

Deliberately does not know: estimators, clocks, history (that is `state`), single tokens (that is `budget`).

Called by: `state.PolicyState`, the scheduler service, the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from paceline.scheduling.cycles import CostModel, Evaluation
from paceline.scheduling.inputs import Placement, PlanInputs
from paceline.scheduling.policy import Policy

# A tree may lengthen a step by this factor over a chain of the same depth, and have this many nodes for each of its
# levels. EAGLE-3 on SmolLM2, depth 5: 12 nodes in place of 5 gave a quarter more tokens per pass for a step a tenth
# longer.
_TREE_STEP = 1.12
NODES_PER_LEVEL = 3
# A hold that ends just before the draft lands costs the wait and the draft; one that is longer costs nothing as long as
# drafts come. Draft times vary too, not only round trips.
_WAIT_SLACK = 1.5
# What is drafted ahead is used where all of the draft was accepted. Below this chance it only costs messages, and below
# the share by which a drafter at work slows the target down it costs more than it brings.
_MIN_AHEAD_PATH_ACCEPTANCE = 0.2
# What paths past outcomes must bring: they cost messages, and a drafter's time, that the model does not price.
_OUTCOMES_MARGIN = 0.01
# Numbers of outcomes that are tried: a few more or less change a hit rate little.
_OUTCOMES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
# Lengths that are tried together with outcomes: their product is what a plan costs, some 5 ms at 8 and 8.
_PATH_LENGTHS = (*range(1, 13), 16, 20, 24, 32, 48, 64)


def evaluate(inputs: PlanInputs) -> Evaluation:
    """The best choice; plain decoding (length 0, speedup 1) takes part.

    Of equals the first is taken, in the order plain, shorter, running before holding. Outcomes must bring something
    that is worth their messages.
    """
    model = CostModel(inputs)
    is_separate = inputs.placement is Placement.SEPARATE
    lengths = range(1, inputs.longest_draft + 1)
    ways = (False, True) if is_separate else (False,)
    chains = (model.chain(length, waits_for_drafts) for length in lengths for waits_for_drafts in ways)
    best = _best(model, model.plain(), chains)
    if not is_separate:
        return best
    path_lengths = [length for length in _PATH_LENGTHS if length <= inputs.longest_draft]
    enumerating = _best(
        model,
        best,
        (
            model.enumerating(length, waits_for_drafts, outcomes, ahead)
            for outcomes in _OUTCOMES
            if outcomes <= inputs.max_outcomes
            for length in path_lengths
            for waits_for_drafts in ways
            for ahead in path_lengths
        ),
    )
    return enumerating if enumerating.tokens_per_s > best.tokens_per_s * (1 + _OUTCOMES_MARGIN) else best


def _best(model: CostModel, first: Evaluation, others: Iterable[Evaluation]) -> Evaluation:
    best = first
    for candidate in others:
        if candidate.tokens_per_s > best.tokens_per_s * (1 + 1e-12) and model.is_allowed(candidate):
            best = candidate
    return best


def policy_of(inputs: PlanInputs, evaluation: Evaluation, version: int, reason: str) -> Policy:
    """The policy that carries out an evaluation."""
    length = evaluation.draft_length
    if length == 0:
        return Policy.off(version, reason)
    load = inputs.num_sequences
    limit_s = inputs.step_time(load * (1 + length)) * _TREE_STEP
    budget, most = max(length, evaluation.ahead), min(inputs.max_nodes, NODES_PER_LEVEL * length)
    while budget < most and inputs.step_time(load * (2 + budget)) <= limit_s:
        budget += 1
    return Policy(
        version,
        length,
        budget,
        math.ceil(min(evaluation.wait_budget_s * _WAIT_SLACK, inputs.max_wait_s) * 1e6),
        _ahead(inputs, evaluation),
        reason,
        evaluation.outcomes,
    )


def _ahead(inputs: PlanInputs, evaluation: Evaluation) -> int:
    """Tokens to draft while the target verifies."""
    length = evaluation.draft_length
    if inputs.placement is not Placement.SEPARATE or inputs.max_outcomes:
        return evaluation.ahead
    # A drafter that cannot tell outcomes apart may still go on from the end of its draft.
    needed = max(_MIN_AHEAD_PATH_ACCEPTANCE, inputs.concurrent_slowdown)
    if inputs.path_acceptances(length)[-1] < needed:
        return 0
    # As many tokens as can be drafted while the target verifies, but no more than one further draft.
    per_token_s = inputs.draft_time(length) / length
    step_s = inputs.step_time(inputs.num_sequences * (1 + length))
    return length if per_token_s * length <= step_s else int(step_s / per_token_s)


def evaluate_policy(inputs: PlanInputs, policy: Policy) -> Evaluation:
    """What a policy brings under inputs that may differ from those it was made for."""
    model, waits_for_drafts = CostModel(inputs), policy.wait_budget_us > 0
    if policy.draft_length and policy.outcomes and policy.draft_ahead:
        return model.enumerating(policy.draft_length, waits_for_drafts, policy.outcomes, policy.draft_ahead)
    return model.chain(policy.draft_length, waits_for_drafts)


def plan(inputs: PlanInputs, version: int = 1) -> Policy:
    """The best policy for these inputs alone; off when it would not beat plain decoding by the margin."""
    best = evaluate(inputs)
    if best.speedup < 1 + inputs.margin:
        return Policy.off(version, f"off: best speedup {best.speedup:.3f} is below {1 + inputs.margin:.3f}")
    return policy_of(inputs, best, version, describe(best))


def describe(evaluation: Evaluation) -> str:
    """One line for people."""
    parts = [f"length {evaluation.draft_length}"]
    if evaluation.is_enumerating:
        parts.append(
            f"{evaluation.ahead} tokens past {evaluation.outcomes} outcomes (hit rate {evaluation.hit_rate:.2f})"
        )
    if evaluation.waits_for_drafts:
        parts.append(f"hold up to {evaluation.wait_budget_s * 1e3:.2f} ms")
    return f"{', '.join(parts)}: expected speedup {evaluation.speedup:.2f}"
