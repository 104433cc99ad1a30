"""Filters against a plain per-row reference."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.sampling.params import SamplingParams, VerifyMode
from paceline.sampling.probabilities import ProbRows, target_probs
from paceline.sampling.processors import process_logits
from paceline.sampling.row_params import RowParams


def reference(logits: list[float], params: SamplingParams) -> list[float]:
    """Probabilities after temperature, min-p, top-k, top-p, one token at a time."""
    best = max(logits)
    if params.is_greedy:
        return [float(index == logits.index(best)) for index in range(len(logits))]
    weights = [math.exp((value - best) / params.temperature) for value in logits]
    weights = [weight if weight >= params.min_p else 0.0 for weight in weights]
    if 0 < params.top_k < len(logits):
        floor = sorted(weights, reverse=True)[params.top_k - 1]
        weights = [weight if weight >= floor else 0.0 for weight in weights]
    if params.top_p < 1:
        total, before, floor = sum(weights), 0.0, 0.0
        for weight in sorted(weights, reverse=True):
            if before / total >= params.top_p:
                break
            floor = weight
            before += weight
        weights = [weight if weight >= floor else 0.0 for weight in weights]
    return [weight / sum(weights) for weight in weights]


parameters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 5, 100]),
    top_p=st.sampled_from([1.0, 0.97, 0.6, 0.05]),
    min_p=st.sampled_from([0.0, 0.03, 0.4]),
)
# Multiples of 0.37: ties are exact, and masses do not land on a nucleus boundary by construction.
logit_rows = st.lists(st.integers(-12, 12).map(lambda step: step * 0.37), min_size=7, max_size=7)


@given(st.lists(st.tuples(logit_rows, parameters), min_size=1, max_size=5))
@settings(max_examples=300, deadline=None)
def test_every_row_gets_its_own_filters(rows: list[tuple[list[float], SamplingParams]]) -> None:
    logits = torch.tensor([row for row, _ in rows], dtype=torch.float32)
    probs = target_probs(logits, RowParams.build([param for _, param in rows], [1] * len(rows)))
    assert probs.dtype == torch.float64
    for index, (_, param) in enumerate(rows):
        assert probs[index].tolist() == pytest.approx(reference(logits[index].tolist(), param), abs=1e-6)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 3000, generator=generator) * 3
    params = [
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(top_k=40),
        SamplingParams(temperature=0),
        SamplingParams(temperature=3, top_p=0.999),  # needs more than the first batch of candidates
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=1.3),
    ]
    together = process_logits(logits, RowParams.build(params, [1] * 6))
    for index, param in enumerate(params):
        alone = process_logits(logits[index : index + 1], RowParams.build([param], [1]))
        assert torch.equal(together[index], alone[0])
    assert int(together[3].isfinite().sum()) > 1024


def test_tied_tokens_are_kept_together() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    for param in (SamplingParams(top_k=2), SamplingParams(top_p=0.6)):
        kept = process_logits(logits, RowParams.build([param], [1])).isfinite()
        assert kept.tolist() == [[True, True, True, False]]


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-6])
def test_a_tiny_temperature_is_greedy_without_overflow(temperature: float) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 5.0, -1.0]])
    probs = target_probs(logits, RowParams.build([SamplingParams(temperature=temperature)], [2]))
    assert probs.tolist() == [[0, 1, 0], [0.5, 0.5, 0]]


def test_a_huge_temperature_is_uniform() -> None:
    probs = target_probs(
        torch.tensor([[1.0, 3.0, -torch.inf]]), RowParams.build([SamplingParams(temperature=1e30)], [1])
    )
    assert probs.tolist() == [[0.5, 0.5, 0.0]]


def test_greedy_rows_are_left_alone() -> None:
    logits = torch.randn(3, 5)
    assert process_logits(logits, RowParams.build([SamplingParams(temperature=0, top_k=1)], [3])) is logits


def test_rows_are_counted() -> None:
    rows = RowParams.build([SamplingParams(seed=2**64 - 1), SamplingParams(temperature=0)], [2, 1])
    assert len(rows) == 3
    assert rows.seeds.tolist() == [-1, -1, 0]
    assert rows.modes == (VerifyMode.COUPLED, VerifyMode.COUPLED, VerifyMode.GREEDY)
    with pytest.raises(ValueError, match="rows of logits"):
        process_logits(torch.zeros(2, 4), rows)
    with pytest.raises(ValueError, match="sequences"):
        RowParams.build([SamplingParams()], [1, 2])


def test_rows_of_probabilities_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed when they are looked at, in any order, greedy ones too; on the kernels and without."""
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(8)) * 3
    params = [
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(top_p=0.7),
        SamplingParams(top_k=4),
    ]
    rows = RowParams.build(params, [1] * 4)
    whole = target_probs(logits, rows)
    assert whole.sum(dim=-1).tolist() == pytest.approx([1] * 4, abs=1e-12)
    for has_kernels in (True, False):
        if not has_kernels:
            monkeypatch.setattr("paceline.sampling.rows.can_run", lambda _: False)
        lazy = ProbRows(logits, rows)
        assert lazy.shape == whole.shape
        for row in (2, 0, 3, 1, 2):
            assert torch.equal(lazy[row], whole[row])
            assert float(lazy[row, 17]) == float(whole[row, 17])


def test_probabilities_are_those_of_a_softmax() -> None:
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(9)) * 4
    probs = target_probs(logits, RowParams.build([SamplingParams()], [3]))
    exact = logits.double().softmax(dim=-1)
    largest = exact.amax(dim=-1, keepdim=True)
    assert bool(((probs - exact).abs() <= 3e-6 * exact + 2.0**-39 * largest).all())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_broken_rows_have_no_probabilities(value: float) -> None:
    logits = torch.zeros(2, 40)
    logits[1] = value
    probs = target_probs(logits, RowParams.build([SamplingParams()], [2]))
    assert probs[0].tolist() == pytest.approx([1 / 40] * 40)
    assert bool(probs[1].isnan().any())
