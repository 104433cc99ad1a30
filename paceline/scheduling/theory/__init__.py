"""Closed forms of speculative decoding, to set beside what is measured.

Each file is one way to run drafter and target: `synchronous`, `pipelined`, `outcomes`; `tree` and `load` say what
widens and narrows them. All start from `CycleParams`: acceptance a, draft cost c, round trip r, verification cost
v(n) and draft length g, in units of a plain step, and give speed over plain decoding. `docs/scheduling.md` tells
how they hang together.
"""

from paceline.scheduling.theory.load import (
    batch_speedup,
    break_even_batch,
    capacity_gain,
    gain_per_cost,
    throughput,
)
from paceline.scheduling.theory.outcomes import (
    CachePlace,
    VerificationOutcome,
    best_outcome_length,
    likeliest_outcomes,
    outcome_bound,
    outcome_hit_rates,
    outcome_speedup,
)
from paceline.scheduling.theory.parameters import CycleParams, flat
from paceline.scheduling.theory.pipelined import best_pipelined, pipelined_speedup, simulate_pipelined
from paceline.scheduling.theory.synchronous import (
    best_synchronous,
    best_synchronous_length,
    break_even_acceptance,
    break_even_remote_round_trip,
    break_even_round_trip,
    chain_limit,
    chain_tokens,
    replica_bound,
    replicas_needed,
    synchronous_speedup,
)
from paceline.scheduling.theory.tree import (
    best_tree_path_acceptances,
    children_acceptance,
    tree_limit,
    tree_tokens,
)

__all__ = [
    "CachePlace",
    "CycleParams",
    "VerificationOutcome",
    "batch_speedup",
    "best_outcome_length",
    "best_pipelined",
    "best_synchronous",
    "best_synchronous_length",
    "best_tree_path_acceptances",
    "break_even_acceptance",
    "break_even_batch",
    "break_even_remote_round_trip",
    "break_even_round_trip",
    "capacity_gain",
    "chain_limit",
    "chain_tokens",
    "children_acceptance",
    "flat",
    "gain_per_cost",
    "likeliest_outcomes",
    "outcome_bound",
    "outcome_hit_rates",
    "outcome_speedup",
    "pipelined_speedup",
    "replica_bound",
    "replicas_needed",
    "simulate_pipelined",
    "synchronous_speedup",
    "throughput",
    "tree_limit",
    "tree_tokens",
]
