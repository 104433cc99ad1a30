"""The sampling kernels: the same bits as torch, in both forms, whatever the rows hold."""

from __future__ import annotations

import ctypes
import json
import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.sampling import kernels, noise, processors, row_probs, rows
from paceline.sampling.choices import (
    _race_filtered,
    _race_whole,
    largest,
    race_listed,
    race_ranks,
    target_choices,
)
from paceline.sampling.params import SamplingParams
from paceline.sampling.probabilities import ProbRows, probs_with_torch
from paceline.sampling.processors import masses_of, process_logits, process_with_torch
from paceline.sampling.row_params import RowParams
from paceline.sampling.rows import maxima_of

pytestmark = pytest.mark.skipif(kernels.load() is None, reason="the sampling kernels are not built")
VECTORS = json.loads((Path(__file__).parent / "noise_vectors.json").read_text())

parameters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1.0, 0.7, 1e-30, 3.0, 1e30]),
    top_k=st.sampled_from([0, 0, 1, 3, 50, 700, 10**6]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.3, 1e-9, 0.999999]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)


def some_logits(kind: str, width: int, seed: int) -> Tensor:
    """One row of a kind that stresses something."""
    logits = torch.randn(width, generator=torch.Generator().manual_seed(seed)) * 4
    if kind == "ties":
        return logits.round()
    if kind == "equal":
        return torch.full((width,), 2.5)
    if kind == "masked":
        logits[1:][torch.rand(width - 1, generator=torch.Generator().manual_seed(seed)) < 0.9] = -torch.inf
    if kind == "near":  # one step of float32 apart, so that temperatures merge some
        return 1 + torch.arange(width).remainder(97) * 2.0**-23
    return logits * 1e30 if kind == "huge" else logits


def by_torch(logits: Tensor, param: SamplingParams, position: int) -> tuple[Tensor, int]:
    processed = process_with_torch(logits, [param])
    seeds = RowParams.build([param], [1]).seeds
    winner = int(_race_whole(processed, torch.tensor([position]), seeds))
    assert winner == int(_race_filtered(processed, torch.tensor([position]), seeds))
    return processed, winner


@given(
    st.lists(parameters, min_size=1, max_size=3),
    st.sampled_from(["plain", "ties", "equal", "masked", "near", "huge"]),
    st.sampled_from([1, 2, 15, 16, 17, 31, 33, 255, 256, 257, 1000, 4097]),
    st.integers(0, 2**40),
    st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_kernels_and_torch_agree(
    params: list[SamplingParams], kind: str, width: int, position: int, only_scalar: bool
) -> None:
    logits = torch.stack([some_logits(kind, width, position % 1000 + i) for i in range(len(params))])
    wanted = [by_torch(logits[i : i + 1], param, position + i) for i, param in enumerate(params)]
    positions = [position + i for i in range(len(params))]
    chosen = rows.choose(logits, range(len(params)), positions, params, only_scalar)
    assert chosen == [winner for _, winner in wanted]
    maxima = maxima_of(logits)
    assert rows.choose(logits, range(len(params)), positions, params, only_scalar, maxima) == chosen
    processed = row_probs.process(logits, params, only_scalar)
    assert processed is not None
    assert torch.equal(processed, torch.cat([row for row, _ in wanted]))
    probs = row_probs.probs(logits, params, only_scalar)
    assert probs is not None
    expected = [probs_with_torch(logits[i : i + 1], [param]) for i, param in enumerate(params)]
    assert torch.equal(probs, torch.cat(expected))
    with_maxima = row_probs.probs(logits, params, only_scalar, maxima)
    assert with_maxima is not None
    assert torch.equal(with_maxima, probs)
    seeds = [param.seed for param in params]
    assert rows.race(processed, positions, seeds, None, only_scalar) == chosen


@pytest.mark.parametrize("vocab", [49_152, 262_144])
@pytest.mark.parametrize("only_scalar", [False, True])
def test_whole_vocabularies_agree(vocab: int, only_scalar: bool) -> None:
    """As wide as real ones; also nuclei larger than the first candidates."""
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(3)) * 3
    params = [
        SamplingParams(seed=1),
        SamplingParams(seed=2, temperature=0.8, top_k=40, top_p=0.95),
        SamplingParams(seed=3, top_p=0.9),
        SamplingParams(seed=4, temperature=2, top_p=0.999),
    ]
    positions = [5, 6, 7, 8]
    wanted = [by_torch(logits[i : i + 1], param, positions[i])[1] for i, param in enumerate(params)]
    assert rows.choose(logits, range(4), positions, params, only_scalar) == wanted
    assert rows.choose(logits, range(4), positions, params, only_scalar, maxima_of(logits)) == wanted
    assert rows.choose(logits, [3, 0], [8, 5], [params[3], params[0]], only_scalar) == [wanted[3], wanted[0]]


@pytest.mark.parametrize("only_scalar", [False, True])
def test_listed_ids_take_their_own_noise(only_scalar: bool) -> None:
    """A drafter's vocabulary: 3001 of 49,152 ids, not in order."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randperm(49_152, generator=generator)[:3001]
    drafted = torch.randn(6, 3001, generator=generator).round()
    wide = torch.full((6, 49_152), -torch.inf)
    wide[:, ids] = drafted
    positions, seeds = list(range(6)), [2**64 - 1 - i for i in range(6)]
    whole = rows.race(wide, positions, seeds, None, only_scalar)
    listed = rows.race(drafted, positions, seeds, ids, only_scalar)
    values = [float(drafted[i, place]) for i, place in enumerate(listed) if place is not None]
    assert values == [float(wide[i, token]) for i, token in enumerate(whole) if token is not None]
    assert [int(ids[place]) for place in listed if place is not None] == whole


def test_a_listed_race_without_kernels_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(6)
    ids = torch.randperm(5000, generator=generator)[:700]
    drafted = torch.randn(5, 700, generator=generator)
    drafted -= drafted.amax(dim=-1, keepdim=True)
    drafted[drafted < -4] = -torch.inf
    part = RowParams.build([SamplingParams(seed=seed) for seed in range(5)], [1] * 5)
    fast = race_listed(drafted, range(5), part, ids)
    monkeypatch.setattr(rows, "can_run", lambda _: False)
    assert torch.equal(race_listed(drafted, range(5), part, ids), fast)


@pytest.mark.parametrize("has_ids", [False, True])
@pytest.mark.parametrize(
    "filters", [{}, {"top_p": 0.9}, {"top_k": 12}, {"min_p": 0.05}, {"top_k": 40, "top_p": 0.8}], ids=str
)
@pytest.mark.parametrize("only_scalar", [False, True])
def test_ranks_of_a_race_are_those_of_the_operators(
    has_ids: bool, filters: dict[str, float], only_scalar: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randperm(5000, generator=generator)[:700] if has_ids else None
    logits = 4 * torch.randn(6, 700, generator=generator)
    logits[4] = logits[4].clamp(max=-2)  # many equals
    params = [SamplingParams(0.7, seed=2**64 - 1 - i, **filters) for i in range(6)]  # type: ignore[arg-type]
    positions = range(40, 46)
    found = rows.rank(logits, positions, params, ids, 8, only_scalar)
    assert found is not None
    monkeypatch.setattr(rows, "can_run", lambda _: False)
    places, sums = race_ranks(logits, positions, params, ids, 8)
    assert torch.equal(found[0], places)
    assert torch.equal(found[1], sums)
    part = RowParams.build(params, [1] * 6)
    assert torch.equal(places[:, 0], race_listed(process_logits(logits, part), positions, part, ids))


def test_ranks_end_where_a_row_has_no_more_and_rows_without_a_choice_are_refused() -> None:
    logits = torch.full((2, 50), -torch.inf)
    logits[:, 7:10] = torch.tensor([1.0, 2.0, 3.0])
    params = [SamplingParams(0.7, seed=1), SamplingParams(0.7, seed=2, top_k=2)]
    found = rows.rank(logits, [3, 4], params, None, 8)
    assert found is not None
    assert found[0].shape == found[1].shape == (2, 2)
    assert set(found[0].flatten().tolist()) <= {7, 8, 9}
    assert set(found[0][1].tolist()) == {8, 9}
    logits[1] = -torch.inf
    assert rows.rank(logits, [3, 4], params, None, 8) is None
    with pytest.raises(ValueError, match="ids for rows of 50"):
        rows.rank(logits, [3, 4], params, torch.arange(49), 8)


def test_choices_without_kernels_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """All kinds of rows together, some broken, chosen out of order."""
    logits = torch.randn(9, 4096, generator=torch.Generator().manual_seed(7)) * 3
    logits[2, 7], logits[4, 9], logits[5] = math.nan, math.inf, -math.inf
    params = [SamplingParams(seed=s, top_k=20 * (s % 3), top_p=1 - 0.2 * (s % 2)) for s in range(8)]
    params.append(SamplingParams(temperature=0))
    at = [8, 7, 6, 5, 4, 3, 2, 1, 0]
    part = RowParams.build(params, [1] * 9)
    fast = target_choices(logits, range(9), part, at)
    assert torch.equal(target_choices(logits, range(9), part, at, maxima_of(logits)), fast)
    monkeypatch.setattr(rows, "can_run", lambda _: False)
    assert torch.equal(target_choices(logits, range(9), part, at), fast)


@pytest.mark.parametrize("width", [1, 31, 32, 33, 1000])
@pytest.mark.parametrize("kind", ["plain", "ties", "masked", "broken"])
def test_the_largest_is_found_by_the_maxima(kind: str, width: int) -> None:
    logits = torch.stack([some_logits(kind, width, seed) for seed in range(7)])
    if kind == "broken":
        logits[1, width // 2], logits[2, -1], logits[3] = math.nan, math.inf, -math.inf
    expected = largest(logits).tolist()
    assert largest(logits, maxima_of(logits)).tolist() == expected
    for only_scalar in (False, True):
        assert rows.largest(logits, maxima_of(logits), only_scalar) == expected


def test_maxima_of_other_rows_are_refused() -> None:
    logits = torch.randn(3, 100)
    for maxima in (maxima_of(logits[:2]), maxima_of(torch.randn(3, 64)), maxima_of(logits).double()):
        with pytest.raises(ValueError, match="maxima are"):
            rows.choose(logits, [0], [1], [SamplingParams()], maxima=maxima)


@pytest.mark.parametrize("only_scalar", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_rows_are_left_to_torch(value: float, only_scalar: bool) -> None:
    logits = torch.randn(3, 100)
    logits[1, 77] = value
    for param in (SamplingParams(), SamplingParams(top_k=5), SamplingParams(top_p=0.5)):
        chosen = rows.choose(logits, range(3), [1, 2, 3], [param] * 3, only_scalar)
        assert [winner is None for winner in chosen] == [False, True, False]
        known = maxima_of(logits)
        assert rows.choose(logits, range(3), [1, 2, 3], [param] * 3, only_scalar, known) == chosen
        assert row_probs.process(logits, [param] * 3, only_scalar) is None
    assert rows.choose(torch.full((1, 8), -math.inf), [0], [0], [SamplingParams()], only_scalar) == [None]


@given(
    parameters,
    st.sampled_from(["plain", "ties", "equal", "masked", "near", "huge"]),
    st.sampled_from([1, 17, 255, 257, 1000, 4097]),
    st.integers(0, 2**20),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_single_shares_are_those_of_the_whole_row(
    param: SamplingParams, kind: str, width: int, seed: int, only_scalar: bool
) -> None:
    logits = some_logits(kind, width, seed).unsqueeze(0).repeat(2, 1)
    whole = probs_with_torch(logits[1:], [param])[0]
    views = [row_probs.RowView(logits, 1, param, maxima) for maxima in (None, maxima_of(logits))]
    shares, with_maxima = row_probs.measure(views, only_scalar)
    assert shares is not None
    assert with_maxima is not None
    assert with_maxima[seed % width] == shares[seed % width]
    asked = {0, width - 1, int(whole.argmax()), int(whole.argmin()), seed % width}
    assert {token: shares[token] for token in asked} == {token: float(whole[token]) for token in asked}
    for token in (-1, width):
        with pytest.raises(IndexError):
            shares[token]


@pytest.mark.parametrize("rest", [-9.0201, -9.0199, -11.0, -27.8, -70.0])
def test_sums_of_many_small_masses_are_exact(rest: float) -> None:
    """A form may add small masses up in fewer bits: no row, however wide, may overflow them."""
    logits = torch.full((1, 2**19 + 5), rest)
    logits[0, 7] = 0.0
    total = int(masses_of(logits).sum())
    [shares] = row_probs.measure([row_probs.RowView(logits, 0, SamplingParams())])
    assert shares is not None
    assert shares[7] == float(masses_of(logits[:, 7])) * (1.0 / float(total))


@given(
    parameters,
    st.sampled_from(["plain", "ties", "equal", "masked", "near", "huge"]),
    st.sampled_from([1, 17, 511, 512, 513, 1000, 4097]),
    st.integers(0, 2**20),
    st.lists(st.floats(2.0**-53, 1 - 2.0**-53), min_size=1, max_size=5),
    st.sets(st.integers(0, 4096), max_size=3),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_draws_pass_the_running_sum_of_masses(
    param: SamplingParams,
    kind: str,
    width: int,
    seed: int,
    noises: list[float],
    left_out: set[int],
    only_scalar: bool,
) -> None:
    logits = some_logits(kind, width, seed).unsqueeze(0)
    masses = masses_of(process_with_torch(logits, [param]))[0].clone()
    without = sorted({token % width for token in left_out} | ({int(masses.argmax())} if seed % 2 else set()))
    masses[without] = 0
    views = [row_probs.RowView(logits, 0, param, maxima) for maxima in (None, maxima_of(logits))]
    shares, with_maxima = row_probs.measure(views, only_scalar)
    assert shares is not None
    assert with_maxima is not None
    running, total = masses.cumsum(0), int(masses.sum())
    for number in noises:
        drawn = shares.draw(number, without)
        assert with_maxima.draw(number, without) == drawn
        if total == 0:
            assert drawn is None
            continue
        wanted = min(int(number * float(total)), total - 1)
        assert drawn == int(torch.searchsorted(running, torch.tensor(wanted), right=True))
        assert drawn not in without
    with pytest.raises(IndexError):
        shares.draw(0.5, [width])


@pytest.mark.parametrize("without", [[], [3], [0, 999]])
def test_a_walk_draws_the_same_with_and_without_kernels(
    without: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0.7, seed=3)
    logits = some_logits("plain", 1000, 4).unsqueeze(0)
    noises = [place / 97 + 1e-3 for place in range(96)]
    build = lambda: ProbRows(logits, RowParams.build([params], [1]))  # noqa: E731
    by_kernels = [build().draw(0, noise, without) for noise in noises]
    monkeypatch.setattr(rows, "can_run", lambda logits: False)
    assert [build().draw(0, noise, without) for noise in noises] == by_kernels
    assert len(set(by_kernels)) > 10
    assert not set(by_kernels) & set(without)


def test_walks_that_look_at_single_probabilities_see_those_of_the_row() -> None:
    params = SamplingParams(temperature=0.7, top_p=0.9, seed=3)
    logits = torch.stack([some_logits("plain", 1000, seed) for seed in range(2)])
    probs = ProbRows(logits, RowParams.build([params], [2]))
    tokens = range(0, 1000, 37)
    single = [float(probs[1, token]) for token in tokens]
    assert single == [float(probs[1][token]) for token in tokens]
    assert single == [float(probs[1, token]) for token in tokens]  # now off the row itself
    logits[0, 5] = torch.nan
    assert math.isnan(float(ProbRows(logits, RowParams.build([params], [2]))[0, 7]))


def test_rows_out_of_range_are_refused() -> None:
    for row in (-1, 2):
        with pytest.raises(IndexError, match="of 2"):
            rows.choose(torch.zeros(2, 8), [row], [0], [SamplingParams()])


@pytest.mark.parametrize("ids", [torch.arange(7), torch.arange(8).unsqueeze(0), torch.arange(8).int()])
def test_ids_that_do_not_fit_are_refused(ids: Tensor) -> None:
    with pytest.raises(ValueError, match="rows of 8"):
        rows.race(torch.zeros(1, 8), [0], [0], ids)


def test_what_the_kernels_do_not_take() -> None:
    assert rows.can_run(torch.zeros(2, 8))
    assert rows.can_run(torch.zeros(1, 8).expand(5, 8))
    assert not rows.can_run(torch.zeros(2, 8, dtype=torch.float64))
    assert not rows.can_run(torch.zeros(8, 2).T)
    assert not rows.can_run(torch.zeros(2, 0))


def test_c_has_the_constants_of_the_definition() -> None:
    """And so has docs/noise.md; a last bit that differs would show in very few numbers."""
    root = Path(kernels.__file__).parents[3]
    header = (Path(kernels.__file__).parent / "noise.h").read_text()
    found = dict(re.findall(r"#define (\w+) (-?0x1\.\w+p[+-]\d+)f?\s", header))
    assert [float.fromhex(found[f"LOG_R{i}"]) for i in range(6)] == list(noise._LOG_SERIES)
    assert [float.fromhex(found[f"EXP_P{i}"]) for i in range(6)] == list(processors._EXP2_SERIES)
    assert float.fromhex(found["LN_2"]) == noise._LN_2 == math.log(2)
    assert float.fromhex(found["LOG2_E"]) == processors._LOG2_E
    assert f"#define SQRT_HALF_BITS {noise._SQRT_HALF_BITS:#X}LL".replace("0X", "0x") in header
    text = (root / "docs" / "noise.md").read_text()
    named = [*(f"LOG_R{i}" for i in range(6)), *(f"EXP_P{i}" for i in range(6)), "LN_2", "LOG2_E"]
    assert [name for name in named if found[name] not in text] == []


def test_c_numbers_are_the_published_vectors() -> None:
    library = kernels.load()
    assert library is not None
    for draw in VECTORS["draws"]:
        tokens = torch.tensor(draw["tokens"])
        out = (ctypes.c_float * len(tokens))()
        pointers = tokens.data_ptr(), len(tokens), ctypes.addressof(out)
        library.pl_gumbel(int(draw["seed"], 16), draw["position"], draw["role"], *pointers)
        assert [value.hex() for value in out] == draw["gumbels"]
