"""Curves, estimators and the planner: pure functions of measurements, with no I/O and no clock of their own."""

from paceline.scheduling.acceptance import AcceptanceEstimator
from paceline.scheduling.budget import StepTable, allocate_nodes
from paceline.scheduling.curves import StepCurve
from paceline.scheduling.cycles import Evaluation, evaluate_length, evaluate_outcomes
from paceline.scheduling.inputs import MeasuredHits, Placement, PlanInputs
from paceline.scheduling.network import DraftTimeModel, DurationSketch
from paceline.scheduling.planner import evaluate, evaluate_policy, plan
from paceline.scheduling.policy import Policy
from paceline.scheduling.state import PolicyMode, PolicyState
from paceline.scheduling.theory import (
    CachePlace,
    CycleParams,
    best_outcome_length,
    best_pipelined,
    best_synchronous,
    break_even_acceptance,
    break_even_batch,
    break_even_round_trip,
    chain_limit,
    chain_tokens,
    outcome_speedup,
    pipelined_speedup,
    simulate_pipelined,
    synchronous_speedup,
)

__all__ = [
    "AcceptanceEstimator",
    "CachePlace",
    "CycleParams",
    "DraftTimeModel",
    "DurationSketch",
    "Evaluation",
    "MeasuredHits",
    "Placement",
    "PlanInputs",
    "Policy",
    "PolicyMode",
    "PolicyState",
    "StepCurve",
    "StepTable",
    "allocate_nodes",
    "best_outcome_length",
    "best_pipelined",
    "best_synchronous",
    "break_even_acceptance",
    "break_even_batch",
    "break_even_round_trip",
    "chain_limit",
    "chain_tokens",
    "evaluate",
    "evaluate_length",
    "evaluate_outcomes",
    "evaluate_policy",
    "outcome_speedup",
    "pipelined_speedup",
    "plan",
    "simulate_pipelined",
    "synchronous_speedup",
]
