"""From logits to the distribution that a request asks for: temperature, min-p, top-k, top-p.

Responsible for: the four filters, vectorised over rows that may each have their own parameters.

Deliberately does not know: noise, drafts, which row belongs to which sequence.

Called by: `choices` and `probabilities`; drafters that sample apply it to their own logits. On a CPU `row_probs`
computes the same bits with the kernels.

The order is vLLM's: temperature, min-p, top-k, top-p, each on what the one before left. Tokens that tie with
the last kept token are kept too, so that the result depends on values alone and not on the order of a sort.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.sampling import row_probs
from paceline.sampling import rows as kernel_rows
from paceline.sampling.params import SamplingParams
from paceline.sampling.row_params import RowParams

_NUCLEUS_CANDIDATES = (
    1024  # most nuclei are far smaller; a full sort of 49k values costs milliseconds on a CPU
)
# 2^r = 1 + r P(r) for r from -1/2 to 1/2. P interpolates (2^r - 1) / r at the six Chebyshev nodes, rounded to
# float32; the relative error of 2^r is below 1e-8 before that of float32 arithmetic.
_EXP2_SERIES = (
    0.6931471824645996,
    0.24022650718688965,
    0.055503569543361664,
    0.009618083015084267,
    0.0013390863314270973,
    0.00015453163359779865,
)
_LOG2_E = 1.4426950216293335  # rounded to float32
_EXP_LOWEST = -60.0  # the mass is 0 long before
_MASS_BITS = 40

_SMALLEST_TEMPERATURE = torch.finfo(torch.float32).tiny


def process_logits(logits: Tensor, rows: RowParams) -> Tensor:
    """Apply every row's filters.

    Args:
        logits: [rows, vocab] float32
        rows: parameters per row.

    Returns:
        [rows, vocab] float32; removed tokens are -inf. Sampled rows are shifted so that their largest value is
            0. Greedy rows are returned unchanged.
    """
    if len(rows) != logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits but parameters for {len(rows)}")
    if rows.all_greedy:
        return logits
    sampled = [index for index, param in enumerate(rows.params) if not param.is_greedy]
    if len(sampled) == len(rows):
        return _process_sampled(logits, rows.params)
    index = torch.tensor(sampled, device=logits.device)
    out = logits.clone()
    out[index] = _process_sampled(logits[index], rows.select(sampled).params)
    return out


def _process_sampled(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """[rows, vocab] float32; all rows have a temperature above 0."""
    has_filter = any(param.top_k > 0 or param.top_p < 1 or param.min_p > 0 for param in params)
    if has_filter and kernel_rows.can_run(logits):
        processed = row_probs.process(logits, params)
        if processed is not None:
            return processed
    return process_with_torch(logits, params)


def process_with_torch(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The definition of the filters, for any device."""
    vocab = logits.shape[-1]
    # Subtracting the maximum first keeps tiny temperatures from overflowing: no quotient is positive.
    temperatures = [max(param.temperature, _SMALLEST_TEMPERATURE) for param in params]
    shifted = logits.to(torch.float32) - logits.amax(dim=-1, keepdim=True)
    scaled = shifted / _column(temperatures, logits.device)
    if any(param.min_p > 0 for param in params):
        # p(x) >= min_p * p(best) is a bound on the logit, because the best one is 0.
        floors = [math.log(param.min_p) if param.min_p > 0 else -math.inf for param in params]
        floor = _column(floors, logits.device)
        scaled = scaled.masked_fill(scaled < floor, -torch.inf)
    limits = [param.top_k if 0 < param.top_k < vocab else vocab for param in params]
    if min(limits) < vocab:
        limited = [index for index, limit in enumerate(limits) if limit < vocab]
        scaled = _keep_above(scaled, limited, _top_k_floor(scaled, limited, limits))
    nuclear = [index for index, param in enumerate(params) if param.top_p < 1]
    if nuclear:
        scaled = _keep_above(
            scaled, nuclear, _top_p_floor(scaled, nuclear, [params[i].top_p for i in nuclear])
        )
    return scaled


def _top_k_floor(scaled: Tensor, limited: Sequence[int], limits: Sequence[int]) -> Tensor:
    """[len(limited), 1]: the k-th largest value of each of these rows."""
    counts = [limits[index] for index in limited]
    largest = scaled[list(limited)].topk(max(counts), dim=-1).values
    return largest.gather(1, torch.tensor(counts, device=scaled.device).unsqueeze(1) - 1)


def _top_p_floor(scaled: Tensor, nuclear: Sequence[int], masses: Sequence[float]) -> Tensor:
    """[len(nuclear), 1]: the smallest value in each row's nucleus (arXiv 1904.09751, section 3.1)."""
    rows = scaled[list(nuclear)]
    # Masses are whole numbers, so that the order of summation, which depends on device and batch, does not
    # matter.
    total = masses_of(rows).sum(dim=-1, keepdim=True)
    wanted = (total.to(torch.float64) * _column(masses, scaled.device, torch.float64)).ceil().to(torch.int64)
    vocab = rows.shape[-1]
    for candidates in (min(_NUCLEUS_CANDIDATES, vocab), vocab):
        largest = rows.topk(candidates, dim=-1).values
        kept = masses_of(largest)
        cumulative = kept.cumsum(dim=-1)
        if candidates == vocab or bool((cumulative[:, -1:] >= wanted).all()):
            break
    # A token is in the nucleus while the mass of those before it has not reached the wanted mass.
    size = ((cumulative - kept) < wanted).sum(dim=-1, keepdim=True).clamp_(min=1)
    return largest.gather(1, size - 1)


def masses_of(scaled: Tensor) -> Tensor:
    """2**40 exp(x), truncated to whole numbers, for float32 x of at most 0: int64 of the same shape, the same bits
    everywhere.

    Every operation is rounded on its own, as in `noise`. The relative error is below 3e-6, or 2**-40 of the
    largest.
    """
    y = scaled.clamp(min=_EXP_LOWEST).mul_(_LOG2_E)
    power = y.round()
    r = y.sub_(power)
    p = r * _EXP2_SERIES[-1]
    for coefficient in _EXP2_SERIES[-2::-1]:
        p.add_(coefficient).mul_(r)
    bits = p.add_(1.0).view(torch.int32)
    exponent = (
        power.nan_to_num_().to(torch.int32).add_(_MASS_BITS) << 23
    )  # NaN occurs in rows of broken logits
    return (bits + exponent).view(torch.float32).to(torch.int64)


def _keep_above(scaled: Tensor, rows: Sequence[int], floor: Tensor) -> Tensor:
    """Remove values below a floor in some rows; the other rows are unchanged."""
    bound = torch.full((scaled.shape[0], 1), -torch.inf, dtype=scaled.dtype, device=scaled.device)
    bound[list(rows)] = floor
    return scaled.masked_fill(scaled < bound, -torch.inf)


def _column(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """[len(values), 1]"""
    return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)
