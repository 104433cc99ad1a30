"""Noise, processors and verification: pure functions on tensors, with no model and no I/O.

Names are loaded on first use, so that a process without torch (the gateway) can import `SamplingParams`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.sampling.batch import verify_step
    from paceline.sampling.choices import target_choices
    from paceline.sampling.noise import NoiseRole, gumbel, gumbel_at, seed_tensor, uniform, uniform_scalar
    from paceline.sampling.params import (
        Constraint,
        ConstraintKind,
        ParameterError,
        SamplingParams,
        VerifyMode,
    )
    from paceline.sampling.processors import RowParams, process_logits, target_probs
    from paceline.sampling.rejection import (
        DraftDistribution,
        decide_chain,
        sample_draft,
        verify_chain_rejection,
    )
    from paceline.sampling.rules import DraftFilter, LogitRule, RuleError
    from paceline.sampling.verify import FinalKind, TreeWalk, Verdict, walk

_HOMES = {
    "Constraint": "params",
    "ConstraintKind": "params",
    "DraftDistribution": "rejection",
    "DraftFilter": "rules",
    "FinalKind": "verify",
    "LogitRule": "rules",
    "NoiseRole": "noise",
    "ParameterError": "params",
    "RowParams": "processors",
    "RuleError": "rules",
    "SamplingParams": "params",
    "TreeWalk": "verify",
    "Verdict": "verify",
    "VerifyMode": "params",
    "decide_chain": "rejection",
    "gumbel": "noise",
    "gumbel_at": "noise",
    "process_logits": "processors",
    "sample_draft": "rejection",
    "seed_tensor": "noise",
    "target_choices": "choices",
    "target_probs": "processors",
    "uniform": "noise",
    "uniform_scalar": "noise",
    "verify_chain_rejection": "rejection",
    "verify_step": "batch",
    "walk": "verify",
}

__all__ = [
    "Constraint",
    "ConstraintKind",
    "DraftDistribution",
    "DraftFilter",
    "FinalKind",
    "LogitRule",
    "NoiseRole",
    "ParameterError",
    "RowParams",
    "RuleError",
    "SamplingParams",
    "TreeWalk",
    "Verdict",
    "VerifyMode",
    "decide_chain",
    "gumbel",
    "gumbel_at",
    "process_logits",
    "sample_draft",
    "seed_tensor",
    "target_choices",
    "target_probs",
    "uniform",
    "uniform_scalar",
    "verify_chain_rejection",
    "verify_step",
    "walk",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
