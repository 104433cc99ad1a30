"""Closed forms of speculative decoding, to compare measurements with.

Each file is one way to run drafter and target: `synchronous`, `pipelined`, `outcomes`. `tree` says what a tree of
drafts adds, `load` what many sequences at once change. All start from `CycleParams`: acceptance a, draft cost c, round
trip r, verification cost v(n) and draft length g, in units of a plain step. All give speed over plain decoding.
`docs/scheduling.md` explains how the forms are related.
"""

from experiments.theory.load import (
    batch_speedup,
    break_even_batch,
    capacity_gain,
    gain_per_cost,
    throughput,
)
from experiments.theory.outcomes import (
    CachePlace,
    best_outcome_length,
    outcome_bound,
    outcome_speedup,
)
from experiments.theory.parameters import CycleParams, flat
from experiments.theory.pipelined import best_pipelined, pipelined_speedup, simulate_pipelined
from experiments.theory.synchronous import (
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
from experiments.theory.tree import (
    best_tree_path_acceptances,
    children_acceptance,
    tree_limit,
    tree_tokens,
)

__all__ = [
    "CachePlace",
    "CycleParams",
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
    "outcome_bound",
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
