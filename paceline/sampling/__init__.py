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
    from paceline.sampling.block import decide_block, verify_block
    from paceline.sampling.choices import race_listed, race_ranks, target_choices
    from paceline.sampling.distribution import MAX_WEIGHT, DraftDistribution, inverse_cdf
    from paceline.sampling.draws import SUPPORT_SIZE, draft_distributions, draw_children, draw_siblings
    from paceline.sampling.log_probs import TokenLogProbs, token_log_probs
    from paceline.sampling.min_tokens import MinTokens
    from paceline.sampling.noise import NoiseRole, gumbel, gumbel_at, seed_tensor, uniform, uniform_scalar
    from paceline.sampling.params import Constraint, ConstraintKind, SamplingParams, VerifyMode
    from paceline.sampling.penalties import Penalties
    from paceline.sampling.probabilities import target_probs
    from paceline.sampling.processors import process_logits
    from paceline.sampling.row_params import RowParams
    from paceline.sampling.rows import maxima_of
    from paceline.sampling.rules import DraftFilter, LogitRule, RuleError
    from paceline.sampling.typical import decide_typical, verify_typical
    from paceline.sampling.verify import FinalKind, TreeWalk, Verdict, walk

_HOMES = {
    "MAX_WEIGHT": "distribution",
    "SUPPORT_SIZE": "draws",
    "BadRuns": "bad_runs",
    "Constraint": "params",
    "ConstraintKind": "params",
    "DraftDistribution": "distribution",
    "DraftFilter": "rules",
    "FinalKind": "verify",
    "LogitBias": "bias",
    "LogitRule": "rules",
    "MinTokens": "min_tokens",
    "NoiseRole": "noise",
    "Penalties": "penalties",
    "RowParams": "row_params",
    "RuleError": "rules",
    "SamplingParams": "params",
    "TokenLogProbs": "log_probs",
    "TreeWalk": "verify",
    "Verdict": "verify",
    "VerifyMode": "params",
    "decide_block": "block",
    "decide_typical": "typical",
    "draft_distributions": "draws",
    "draw_children": "draws",
    "draw_siblings": "draws",
    "gumbel": "noise",
    "gumbel_at": "noise",
    "inverse_cdf": "distribution",
    "maxima_of": "rows",
    "process_logits": "processors",
    "race_listed": "choices",
    "race_ranks": "choices",
    "seed_tensor": "noise",
    "target_choices": "choices",
    "target_probs": "probabilities",
    "token_log_probs": "log_probs",
    "uniform": "noise",
    "uniform_scalar": "noise",
    "verify_block": "block",
    "verify_step": "batch",
    "verify_typical": "typical",
    "walk": "verify",
}

__all__ = [
    "MAX_WEIGHT",
    "SUPPORT_SIZE",
    "BadRuns",
    "Constraint",
    "ConstraintKind",
    "DraftDistribution",
    "DraftFilter",
    "FinalKind",
    "LogitBias",
    "LogitRule",
    "MinTokens",
    "NoiseRole",
    "Penalties",
    "RowParams",
    "RuleError",
    "SamplingParams",
    "TokenLogProbs",
    "TreeWalk",
    "Verdict",
    "VerifyMode",
    "decide_block",
    "decide_typical",
    "draft_distributions",
    "draw_children",
    "draw_siblings",
    "gumbel",
    "gumbel_at",
    "inverse_cdf",
    "maxima_of",
    "process_logits",
    "race_listed",
    "race_ranks",
    "seed_tensor",
    "target_choices",
    "target_probs",
    "token_log_probs",
    "uniform",
    "uniform_scalar",
    "verify_block",
    "verify_step",
    "verify_typical",
    "walk",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
