"""Curves, estimators and the planner: pure functions of measurements, with no I/O and no clock of their own."""

from paceline.scheduling.acceptance import AcceptanceEstimator
from paceline.scheduling.budget import allocate_nodes
from paceline.scheduling.curves import StepCurve
from paceline.scheduling.network import DraftTimeModel, DurationEstimator, DurationSketch
from paceline.scheduling.planner import Evaluation, Placement, PlanInputs, evaluate, evaluate_length, plan
from paceline.scheduling.policy import Policy
from paceline.scheduling.state import PolicyMode, PolicyState

__all__ = [
    "AcceptanceEstimator",
    "DraftTimeModel",
    "DurationEstimator",
    "DurationSketch",
    "Evaluation",
    "Placement",
    "PlanInputs",
    "Policy",
    "PolicyMode",
    "PolicyState",
    "StepCurve",
    "allocate_nodes",
    "evaluate",
    "evaluate_length",
    "plan",
]
