"""Curves, estimators and the planner: pure functions of measurements, with no I/O and no clock of their own."""

from paceline.scheduling.acceptance import AcceptanceEstimator
from paceline.scheduling.budget import StepTable, allocate_nodes
from paceline.scheduling.curves import StepCurve
from paceline.scheduling.cycles import CostModel, Evaluation
from paceline.scheduling.draft_times import DraftTimeModel
from paceline.scheduling.durations import DurationSketch
from paceline.scheduling.inputs import DrafterPlacement, MeasuredHits, PlanInputs
from paceline.scheduling.planner import evaluate, evaluate_policy, plan
from paceline.scheduling.state import PolicyMode, PolicyState

__all__ = [
    "AcceptanceEstimator",
    "CostModel",
    "DraftTimeModel",
    "DrafterPlacement",
    "DurationSketch",
    "Evaluation",
    "MeasuredHits",
    "PlanInputs",
    "PolicyMode",
    "PolicyState",
    "StepCurve",
    "StepTable",
    "allocate_nodes",
    "evaluate",
    "evaluate_policy",
    "plan",
]
