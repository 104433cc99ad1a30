"""The best way to speculate under the cost model, and the policy that carries it out.

Responsible for: the search over lengths, waiting, outcomes and tokens past each outcome; node budget and
reason.

Deliberately does not know: estimators, clocks, history (`state`), single tokens (`budget`).

Called by: `state.PolicyState`, the scheduler service, the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from paceline.contract.policy import SpeculationPolicy
from paceline.scheduling.cycles import CostModel, Evaluation
from paceline.scheduling.inputs import DrafterPlacement, PlanInputs

# A tree may lengthen a step by this factor over a chain of the same depth, and may have this many nodes per
# level. EAGLE-3 on SmolLM2, depth 5: 12 nodes in place of 5 gave a quarter more tokens per pass for a step a
# tenth longer.
_TREE_STEP = 1.12
NODES_PER_LEVEL = 3
# A wait that ends just before the draft arrives costs both the wait and the draft. A longer wait budget costs
# nothing as long as drafts arrive. Draft times vary too, not only round trips.
_WAIT_SLACK = 1.5
# Tokens drafted ahead are used where all of the draft was accepted. Below this chance they only cost
# messages. Below the fraction by which a drafter at work slows the target down they cost more than they
# bring.
_MIN_AHEAD_PATH_ACCEPTANCE = 0.2
# The fraction that a speculation cache must gain: it costs messages and drafter time that the model does not
# price.
_OUTCOMES_MARGIN = 0.01
# Numbers of outcomes that are evaluated: a few more or less change a hit rate little.
_OUTCOMES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
# Lengths that are evaluated together with outcomes. A plan's time grows with their product: some 5 ms at 8
# and 8.
_PATH_LENGTHS = (*range(1, 13), 16, 20, 24, 32, 48, 64)


def evaluate(inputs: PlanInputs) -> Evaluation:
    """The best choice; plain decoding (length 0, speedup 1) is one of the candidates.

    Of equal choices the first is taken, in the order plain, shorter, running before waiting. A speculation
    cache must bring more than its messages cost.
    """
    model = CostModel(inputs)
    is_separate = inputs.placement is DrafterPlacement.SEPARATE
    lengths = range(1, inputs.longest_draft + 1)
    ways = (False, True) if is_separate else (False,)
    chains = (model.chain(length, waits_for_drafts) for length in lengths for waits_for_drafts in ways)
    best = _best(model, model.plain(), chains)
    if not is_separate:
        return best
    path_lengths = [length for length in _PATH_LENGTHS if length <= inputs.longest_draft]
    cached = _best(
        model,
        best,
        (
            model.cached(length, waits_for_drafts, outcomes, ahead)
            for outcomes in _OUTCOMES
            if outcomes <= inputs.max_outcomes
            for length in path_lengths
            for waits_for_drafts in ways
            for ahead in path_lengths
        ),
    )
    return cached if cached.tokens_per_s > best.tokens_per_s * (1 + _OUTCOMES_MARGIN) else best


def _best(model: CostModel, first: Evaluation, others: Iterable[Evaluation]) -> Evaluation:
    best = first
    for candidate in others:
        if candidate.tokens_per_s > best.tokens_per_s * (1 + 1e-12) and model.is_allowed(candidate):
            best = candidate
    return best


def policy_of(inputs: PlanInputs, evaluation: Evaluation, version: int, reason: str) -> SpeculationPolicy:
    """The policy that carries out an evaluation."""
    length = evaluation.draft_length
    if length == 0:
        return SpeculationPolicy.off(version, reason)
    load = inputs.num_sequences
    limit_s = inputs.step_time(load * (1 + length)) * _TREE_STEP
    budget, most = max(length, evaluation.draft_ahead), min(inputs.max_nodes, NODES_PER_LEVEL * length)
    while budget < most and inputs.step_time(load * (2 + budget)) <= limit_s:
        budget += 1
    policy = SpeculationPolicy(
        version,
        length,
        budget,
        math.ceil(min(evaluation.wait_budget_s * _WAIT_SLACK, inputs.max_wait_s) * 1e6),
        _ahead(inputs, evaluation),
        reason,
        evaluation.num_outcomes,
    )
    return policy.within_limits()


def _ahead(inputs: PlanInputs, evaluation: Evaluation) -> int:
    """Tokens to draft while the target verifies."""
    length = evaluation.draft_length
    if inputs.placement is not DrafterPlacement.SEPARATE or inputs.max_outcomes:
        return evaluation.draft_ahead
    # A drafter that cannot draft past several outcomes may still continue from the end of its draft.
    needed = max(_MIN_AHEAD_PATH_ACCEPTANCE, inputs.concurrent_slowdown)
    if inputs.path_acceptances(length)[-1] < needed:
        return 0
    # As many tokens as can be drafted while the target verifies, but no more than one further draft.
    per_token_s = inputs.draft_time(length) / length
    step_s = inputs.step_time(inputs.num_sequences * (1 + length))
    return length if per_token_s * length <= step_s else int(step_s / per_token_s)


def evaluate_policy(inputs: PlanInputs, policy: SpeculationPolicy) -> Evaluation:
    """What a policy brings under inputs that may differ from those it was made for."""
    model, waits_for_drafts = CostModel(inputs), policy.wait_budget_us > 0
    if policy.draft_length and policy.num_outcomes and policy.draft_ahead:
        return model.cached(policy.draft_length, waits_for_drafts, policy.num_outcomes, policy.draft_ahead)
    return model.chain(policy.draft_length, waits_for_drafts)


def plan(inputs: PlanInputs, version: int = 1) -> SpeculationPolicy:
    """The best policy for these inputs alone; off when it would not be faster than plain decoding by the margin."""
    best = evaluate(inputs)
    if best.speedup < 1 + inputs.margin:
        return SpeculationPolicy.off(
            version, f"off: best speedup {best.speedup:.3f} is below {1 + inputs.margin:.3f}"
        )
    return policy_of(inputs, best, version, describe(best))


def describe(evaluation: Evaluation) -> str:
    """One line for people."""
    parts = [f"length {evaluation.draft_length}"]
    if evaluation.uses_speculation_cache:
        parts.append(
            f"{evaluation.draft_ahead} tokens past {evaluation.num_outcomes} outcomes"
            f" (hit rate {evaluation.hit_rate:.2f})"
        )
    if evaluation.waits_for_drafts:
        parts.append(f"wait up to {evaluation.wait_budget_s * 1e3:.2f} ms")
    return f"{', '.join(parts)}: expected speedup {evaluation.speedup:.2f}"
