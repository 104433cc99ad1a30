"""From logits to the distribution a request asked for: temperature, min-p, top-k, top-p.

Responsible for: the four filters, vectorised over rows that may each have their own parameters.

Deliberately does not know: noise, drafts, which row belongs to which sequence.

Called by: `choices` and `rejection` in this package; drafters that sample apply it to their own logits.

On a CPU the compiled form of `rows` does it, with the same result bit for bit.

Order, as vLLM applies it: temperature, min-p, top-k, top-p, each on what the one before left. Tokens tied
with the last one kept are kept too, so the result depends on values alone and not on the order of a sort.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from paceline.sampling import rows as kernel_rows
from paceline.sampling.distribution import inverse_cdf
from paceline.sampling.noise import seed_tensor
from paceline.sampling.params import SamplingParams, VerifyMode

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
_EXP_LOWEST = -60.0  # there the mass has long been 0
_MASS_BITS = 40

_SMALLEST_TEMPERATURE = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class RowParams:
    """Sampling parameters for every row of a step. Tensors are made on first use: greedy rows need none."""

    params: tuple[SamplingParams, ...]
    device: torch.device

    @classmethod
    def build(
        cls,
        params: Sequence[SamplingParams],
        rows_per_sequence: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> RowParams:
        """Repeat each sequence's parameters once per row it has in the step."""
        if len(params) != len(rows_per_sequence):
            raise ValueError(f"{len(params)} parameter sets for {len(rows_per_sequence)} sequences")
        rows = (param for param, count in zip(params, rows_per_sequence, strict=True) for _ in range(count))
        return cls(tuple(rows), torch.device(device))

    def select(self, indices: Sequence[int]) -> RowParams:
        """The parameters of some rows."""
        return RowParams(tuple(self.params[index] for index in indices), self.device)

    def __len__(self) -> int:
        return len(self.params)

    @cached_property
    def all_greedy(self) -> bool:
        """Whether no row needs anything but its largest logit."""
        return all(param.is_greedy for param in self.params)

    @cached_property
    def modes(self) -> tuple[VerifyMode, ...]:
        """The mode that applies to each row."""
        return tuple(param.resolved_mode for param in self.params)

    @cached_property
    def seeds(self) -> Tensor:
        """[rows] int64: the seeds' bits."""
        return seed_tensor([param.seed for param in self.params], self.device)


def process_logits(logits: Tensor, rows: RowParams) -> Tensor:
    """Apply every row's filters.

    Args:
        logits: [rows, vocab] float32
        rows: parameters per row.

    Returns:
        [rows, vocab] float32; removed tokens are -inf. Sampled rows are shifted so that their largest value
        is 0. Greedy rows come back as they were.
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


def target_probs(logits: Tensor, rows: RowParams) -> Tensor:
    """[rows, vocab] float64: the distribution each row is to be sampled from; one-hot for greedy rows.

    Probabilities are multiples of 2**-40 of the likeliest token's, with a relative error below 3e-6: what the
    rounding of float32 logits makes of them anyway. In return they have the same bits on every device.
    """
    sampled = [index for index, param in enumerate(rows.params) if not param.is_greedy]
    if len(sampled) == len(rows):
        return _probs_sampled(logits, rows.params)
    probs = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    probs.scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
    if sampled:
        probs[sampled] = _probs_sampled(logits[sampled], rows.select(sampled).params)
    return probs


class ProbRows:
    """`target_probs`, for walks that look at some rows only: `[rows, vocab]` float64, indexed by row or (row, token).

    Where the kernels run, a row is written when all of it is first asked for, and single probabilities without that.
    Elsewhere all of them are at once: there one
    operation for all rows costs less than one for each.
    """

    def __init__(self, logits: Tensor, rows: RowParams, maxima: Tensor | None = None) -> None:
        self.shape = logits.shape
        self._logits = logits
        self._maxima = maxima
        self._rows = rows
        self._known: dict[int, Tensor] = {}
        self._shares: dict[int, kernel_rows.Shares | None] = {}  # None where the kernels have no say
        self._runs_on_kernels = kernel_rows.can_run(logits)

    def __getitem__(self, key: int | tuple[int, int]) -> Tensor:
        row, *tokens = key if isinstance(key, tuple) else (key,)
        if tokens and (shares := self._shares_of(row)) is not None:
            return torch.tensor(shares[tokens[0]], dtype=torch.float64)
        if row not in self._known:
            param = self._rows.params[row]
            if self._runs_on_kernels and not param.is_greedy:
                own = None if self._maxima is None else self._maxima[row : row + 1]
                self._known[row] = _probs_sampled(self._logits[row : row + 1], (param,), own)[0]
            else:
                self._known = dict(enumerate(target_probs(self._logits, self._rows)))
        found = self._known[row]
        return found[tokens[0]] if tokens else found

    def draw(self, row: int, noise: float, without: Sequence[int] = ()) -> int:
        """A token drawn from a row by a number in (0, 1), some distinct tokens left out."""
        if (shares := self._shares_of(row)) is not None:
            token = shares.draw(noise, without)
            if token is not None:
                return token
        return draw_without(self[row], noise, without)

    def _shares_of(self, row: int) -> kernel_rows.Shares | None:
        """A row's probabilities one by one; None where the kernels have no say, or all of it is known."""
        if row in self._known:
            return None
        measure_rows([(self, row)])
        return self._shares[row]

    def unmeasured(self, row: int) -> kernel_rows.RowView | None:
        """A row that the kernels have yet to measure before single probabilities of it can be had; else None."""
        if row in self._shares or row in self._known:
            return None
        param = self._rows.params[row]
        if not self._runs_on_kernels or param.is_greedy:
            self._shares[row] = None
            return None
        return kernel_rows.RowView(self._logits, row, param, self._maxima)

    def take(self, row: int, shares: kernel_rows.Shares | None) -> None:
        """What the kernels found of a row."""
        self._shares[row] = shares


def measure_rows(rows: Sequence[tuple[ProbRows, int]]) -> None:
    """Make rows ready for questions about single probabilities: those that the kernels measure, in one call."""
    views = [(probs, row, view) for probs, row in rows if (view := probs.unmeasured(row)) is not None]
    if views:
        found = kernel_rows.measure([view for _, _, view in views])
        for (probs, row, _), shares in zip(views, found, strict=True):
            probs.take(row, shares)


def draw_without(probs: Tensor, noise: float, without: Sequence[int] = ()) -> int:
    """A token drawn from probabilities `[vocab]` float64 by a number in (0, 1), some distinct tokens left out.

    Where nothing would be left, which is impossible but for rounding, nothing is left out.
    """
    if without:
        rest = probs.clone()
        rest[list(without)] = 0
        probs = rest if float(rest.sum()) > 0 else probs
    return inverse_cdf(probs, noise)


def _probs_sampled(logits: Tensor, params: Sequence[SamplingParams], maxima: Tensor | None = None) -> Tensor:
    """[rows, vocab] float64, all rows with a temperature above 0."""
    if kernel_rows.can_run(logits):
        probs = kernel_rows.probs(logits, params, maxima=maxima)
        if probs is not None:
            return probs
    return _probs_with_torch(logits, params)


def _probs_with_torch(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The definition of the probabilities, for any device: shares of the whole masses of what is left."""
    processed = _process_with_torch(logits, params)
    masses = _masses(processed)
    probs = masses.to(torch.float64).mul_(1.0 / masses.sum(dim=-1, keepdim=True).to(torch.float64))
    return probs.masked_fill_(processed.isnan(), torch.nan)


def _process_sampled(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """[rows, vocab] float32, all rows with a temperature above 0."""
    has_filter = any(param.top_k > 0 or param.top_p < 1 or param.min_p > 0 for param in params)
    if has_filter and kernel_rows.can_run(logits):
        processed = kernel_rows.process(logits, params)
        if processed is not None:
            return processed
    return _process_with_torch(logits, params)


def _process_with_torch(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The definition of the filters, for any device."""
    vocab = logits.shape[-1]
    # Subtracting the maximum first keeps tiny temperatures from overflowing: the quotients are never
    # positive.
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
    # Whole numbers, so that the order of summation, which varies with device and batch, cannot move the boundary.
    total = _masses(rows).sum(dim=-1, keepdim=True)
    wanted = (total.to(torch.float64) * _column(masses, scaled.device, torch.float64)).ceil().to(torch.int64)
    vocab = rows.shape[-1]
    for candidates in (min(_NUCLEUS_CANDIDATES, vocab), vocab):
        largest = rows.topk(candidates, dim=-1).values
        kept = _masses(largest)
        cumulative = kept.cumsum(dim=-1)
        if candidates == vocab or bool((cumulative[:, -1:] >= wanted).all()):
            break
    # A token is in the nucleus while the mass of those before it has not reached the wanted mass.
    size = ((cumulative - kept) < wanted).sum(dim=-1, keepdim=True).clamp_(min=1)
    return largest.gather(1, size - 1)


def _masses(scaled: Tensor) -> Tensor:
    """2**40 exp(x), cut to whole numbers, for float32 x of at most 0: int64 of the same shape, same bits everywhere.

    By operations that are rounded one at a time, as in `noise`. Relative error below 3e-6, or 2**-40 of the largest.
    """
    y = scaled.clamp(min=_EXP_LOWEST).mul_(_LOG2_E)
    power = y.round()
    r = y.sub_(power)
    p = r * _EXP2_SERIES[-1]
    for coefficient in _EXP2_SERIES[-2::-1]:
        p.add_(coefficient).mul_(r)
    bits = p.add_(1.0).view(torch.int32)
    exponent = power.nan_to_num_().to(torch.int32).add_(_MASS_BITS) << 23  # NaN: of a row of broken logits
    return (bits + exponent).view(torch.float32).to(torch.int64)


def _keep_above(scaled: Tensor, rows: Sequence[int], floor: Tensor) -> Tensor:
    """Remove what lies below a floor in some rows; the others stay."""
    bound = torch.full((scaled.shape[0], 1), -torch.inf, dtype=scaled.dtype, device=scaled.device)
    bound[list(rows)] = floor
    return scaled.masked_fill(scaled < bound, -torch.inf)


def _column(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """[len(values), 1]"""
    return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)
