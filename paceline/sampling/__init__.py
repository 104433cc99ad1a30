"""Noise, processors and verification: pure functions on tensors, with no model and no I/O.

Names are loaded on first use, so that a process without torch (the gateway) can import `SamplingParams`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.sampling.bad_runs import BadRuns
    from paceline.sampling.batch import verify_step
    from paceline.sampling.bias import LogitBias
    from paceline.sampling.choices import target_choices
    from paceline.sampling.log_probs import TokenLogProbs, token_log_probs
    from paceline.sampling.min_tokens import MinTokens
    from paceline.sampling.noise import NoiseRole, gumbel, gumbel_at, seed_tensor, uniform, uniform_scalar
    from paceline.sampling.params import (
        Constraint,
        ConstraintKind,
        ParameterError,
        SamplingParams,
        VerifyMode,
    )
    from paceline.sampling.penalties import Penalties
    from paceline.sampling.processors import RowParams, process_logits, target_probs
    from paceline.sampling.rejection import (
        DraftDistribution,
        decide_chain,
        sample_draft,
        verify_chain_rejection,
    )
    from paceline.sampling.rules import LogitRule
    from paceline.sampling.verify import FinalKind, TreeWalk, Verdict, walk

_HOMES = {
    "BadRuns": "bad_runs",
    "Constraint": "params",
    "ConstraintKind": "params",
    "DraftDistribution": "rejection",
    "FinalKind": "verify",
    "LogitBias": "bias",
    "LogitRule": "rules",
    "MinTokens": "min_tokens",
    "NoiseRole": "noise",
    "ParameterError": "params",
    "Penalties": "penalties",
    "RowParams": "processors",
    "SamplingParams": "params",
    "TokenLogProbs": "log_probs",
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
    "token_log_probs": "log_probs",
    "uniform": "noise",
    "uniform_scalar": "noise",
    "verify_chain_rejection": "rejection",
    "verify_step": "batch",
    "walk": "verify",
}

__all__ = [
    "BadRuns",
    "Constraint",
    "ConstraintKind",
    "DraftDistribution",
    "FinalKind",
    "LogitBias",
    "LogitRule",
    "MinTokens",
    "NoiseRole",
    "ParameterError",
    "Penalties",
    "RowParams",
    "SamplingParams",
    "TokenLogProbs",
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
    "token_log_probs",
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
