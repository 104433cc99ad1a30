"""Counter-based noise: published vectors, the documented layout, independence of how it is asked for."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.sampling import kernels
from paceline.sampling.noise import (
    NoiseRole,
    _gumbel_of,
    gumbel,
    gumbel_at,
    seed_tensor,
    uniform,
    uniform_scalar,
)
from paceline.sampling.philox import philox4x32
from paceline.sampling.processors import masses_of
from tests.sampling.noise_reference import gumbel32_of, gumbel_of, mass_of, vectors

# The three philox4x32-10 lines of Random123's known-answer file: counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]

VECTORS = json.loads((Path(__file__).parent / "noise_vectors.json").read_text())


def words_of(text: str) -> list[torch.Tensor]:
    return [torch.tensor(int(word, 16)) for word in text.split()]


def philox_reference(counter: list[int], key: list[int]) -> list[int]:
    """The same generator in Python integers."""
    for _ in range(10):
        product_0, product_1 = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (product_1 >> 32) ^ counter[1] ^ key[0],
            product_1 & 0xFFFFFFFF,
            (product_0 >> 32) ^ counter[3] ^ key[1],
            product_0 & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(counter: str, key: str, result: str) -> None:
    words = philox4x32(words_of(counter), words_of(key))
    assert [f"{int(word):08x}" for word in words] == result.split()


@pytest.mark.parametrize("seed", [0, 1, 0x0123456789ABCDEF, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 5, 2**33 + 7])
def test_the_layout_is_the_documented_one(seed: int, position: int) -> None:
    role = NoiseRole.FINAL
    key = [seed & 0xFFFFFFFF, seed >> 32]
    words = [
        word
        for block in range(3)
        for word in philox_reference([block, role, position & 0xFFFFFFFF, position >> 32], key)
    ]
    uniforms = uniform(seed, [position], role, 5)[0].tolist()
    expected = [((words[2 * i] << 20 | words[2 * i + 1] >> 12) + 0.5) * 2.0**-52 for i in range(5)]
    assert uniforms == expected
    assert uniform_scalar(seed, position, role) == expected[0]
    gumbels = gumbel(seed, [position], role, 10, torch.float64)[0].tolist()
    assert gumbels == pytest.approx([-math.log(-math.log1p(-(w + 0.5) / 2**32)) for w in words[:10]])


def test_rows_do_not_depend_on_their_neighbours() -> None:
    """One row alone, among others, or in part: the same bits (large enough to be computed in several chunks)."""
    positions, seeds = [3, 9, 2**40], seed_tensor([5, 2**64 - 2, 7])
    together = gumbel(seeds, positions, NoiseRole.TARGET, 20_001)
    for row, position in enumerate(positions):
        alone = gumbel(seeds[row : row + 1], [position], NoiseRole.TARGET, 20_001)
        assert torch.equal(together[row], alone[0])
    assert torch.equal(gumbel(seeds, positions, NoiseRole.TARGET, 37), together[:, :37])


def test_some_ids_get_the_numbers_they_have_among_all() -> None:
    everything = gumbel(11, [4, 5], NoiseRole.TARGET, 999)
    ids = torch.tensor([[0, 3, 4, 998], [17, 500, 501, 502]])
    assert torch.equal(gumbel_at(11, [4, 5], NoiseRole.TARGET, ids), everything.gather(1, ids))


def test_seeds_positions_and_roles_give_different_numbers() -> None:
    draws = {
        tuple(uniform(seed, [position], role, 2)[0].tolist())
        for seed in (0, 1, 2**32, 2**63)
        for position in (0, 1, 2**32)
        for role in NoiseRole
    }
    assert len(draws) == 4 * 3 * len(NoiseRole)


@pytest.mark.parametrize("has_kernels", [True, False])
def test_numbers_are_the_published_vectors(has_kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit; the file comes from `noise_reference`, which computes without torch."""
    if not has_kernels:
        monkeypatch.setattr(kernels, "load", lambda: None)
    assert vectors() == VECTORS
    for draw in VECTORS["draws"]:
        seed, position, role = int(draw["seed"], 16), draw["position"], NoiseRole(draw["role"])
        assert [value.hex() for value in uniform(seed, [position], role, 3)[0].tolist()] == draw["uniforms"]
        for index, expected in enumerate(draw["uniforms"]):
            assert uniform_scalar(seed, position, role, index).hex() == expected
        numbers = gumbel_at(seed, [position], role, torch.tensor([draw["tokens"]]))[0]
        assert [value.hex() for value in numbers.tolist()] == draw["gumbels"]
        everything = gumbel(seed, [position], role, max(draw["tokens"]) + 1)[0]
        assert torch.equal(everything[draw["tokens"]], numbers)
    words = torch.tensor([int(item["word"], 16) for item in VECTORS["by_word"]])
    for dtype, name in ((torch.float32, "float32"), (torch.float64, "float64")):
        found = [value.hex() for value in _gumbel_of(words, dtype).tolist()]
        assert found == [item[name] for item in VECTORS["by_word"]]


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200))
@settings(max_examples=100, deadline=None)
def test_torch_computes_what_plain_python_does(words: list[int]) -> None:
    tensor = torch.tensor(words)
    assert _gumbel_of(tensor, torch.float64).tolist() == [gumbel_of(word) for word in words]
    assert _gumbel_of(tensor, torch.float32).tolist() == [gumbel32_of(word) for word in words]


def test_numbers_fall_as_words_rise() -> None:
    """Strictly in float64: at both ends, at random, and where a logarithm takes another power of 2."""
    edges = [0, 2**32 - 1]
    for power in range(-33, 6):
        for edge in (2.0**power * math.sqrt(0.5), -math.expm1(-(2.0**power) * math.sqrt(0.5))):
            # where 1 - c, then where -log(1 - c), crosses the edge
            edges += [int((1 - edge) * 2**32), int(edge * 2**32)]
    generator = torch.Generator().manual_seed(4)
    starts = torch.cat([torch.tensor(edges), torch.randint(2**32, (20_000,), generator=generator)])
    words = (starts.unsqueeze(1) + torch.arange(-20, 21)).clamp_(0, 2**32 - 1)
    numbers = _gumbel_of(words, torch.float64)
    assert bool(((numbers.diff() < 0) | (words.diff() == 0)).all())
    assert bool((_gumbel_of(words, torch.float32).diff() <= 0).all())
    ends = _gumbel_of(torch.tensor([0, 2**32 - 1]), torch.float32).tolist()
    assert ends == pytest.approx([33 * math.log(2), -math.log(33 * math.log(2))], rel=1e-7)


def test_numbers_are_minus_the_logarithm_of_an_exponential_one() -> None:
    words = torch.randint(2**32, (200_000,), generator=torch.Generator().manual_seed(5))
    complement = (words.double() + 0.5) * 2.0**-32
    expected = -(-torch.log1p(-complement)).log()
    assert float((_gumbel_of(words, torch.float64) - expected).abs().max()) < 5e-15
    single = _gumbel_of(words, torch.float32).double()
    assert float(((single - expected).abs() / expected.abs().clamp(min=1e-6)).max()) < 1.2e-7


def test_a_million_numbers_are_gumbel_distributed() -> None:
    """Kolmogorov-Smirnov; the bound is passed with probability 1e-6 (2 exp(-2 n d^2))."""
    numbers = gumbel(8, range(20), NoiseRole.TARGET, 50_000).double().flatten().sort().values
    law = (-(-numbers).exp()).exp()
    steps = torch.arange(len(numbers) + 1, dtype=torch.float64) / len(numbers)
    distance = float(torch.maximum((law - steps[:-1]).abs(), (law - steps[1:]).abs()).max())
    assert 1e-5 < distance < math.sqrt(math.log(2e6) / (2 * len(numbers)))


def test_masses_are_exponentials() -> None:
    scaled = torch.cat([torch.tensor([0.0, -torch.inf, -1e30, -27.7, -27.8]), -torch.rand(5000) * 40]).float()
    masses = masses_of(scaled)
    assert masses.tolist() == [mass_of(value) for value in scaled.tolist()]
    assert masses[:3].tolist() == [2**40, 0, 0]
    exact = scaled.double().exp() * 2.0**40
    assert bool(((masses - exact).abs() <= 1 + exact * 3e-6).all())


@pytest.mark.gpu
def test_cuda_computes_the_same_bits() -> None:
    seeds, positions = seed_tensor([1, 2**64 - 1, 77]), torch.tensor([0, 5, 2**40])
    for role in NoiseRole:
        here = gumbel(seeds, positions, role, 262_144)
        assert torch.equal(gumbel(seeds.cuda(), positions.cuda(), role, 262_144).cpu(), here)
        assert torch.equal(
            uniform(seeds.cuda(), positions.cuda(), role, 9_999).cpu(),
            uniform(seeds, positions, role, 9_999),
        )
    words = torch.randint(2**32, (10**6,), generator=torch.Generator().manual_seed(9))
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(_gumbel_of(words.cuda(), dtype).cpu(), _gumbel_of(words, dtype))
    scaled = -torch.rand(10**6, generator=torch.Generator().manual_seed(10)) * 40
    assert torch.equal(masses_of(scaled.cuda()).cpu(), masses_of(scaled))


def test_moments_are_those_of_the_distributions() -> None:
    """300k numbers: the bounds are about six standard errors."""
    uniforms = uniform(3, range(300), NoiseRole.ACCEPT, 1000)
    assert uniforms.dtype == torch.float64
    assert float(uniforms.min()) > 0
    assert float(uniforms.max()) < 1
    assert float(uniforms.mean()) == pytest.approx(0.5, abs=0.0032)
    assert float(uniforms.var()) == pytest.approx(1 / 12, abs=0.001)
    gumbels = gumbel(3, range(300), NoiseRole.TARGET, 1000)
    assert float(gumbels.mean()) == pytest.approx(0.57722, abs=0.015)
    assert float(gumbels.var()) == pytest.approx(math.pi**2 / 6, abs=0.04)
