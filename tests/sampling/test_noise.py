"""Counter-based noise: published vectors, the documented layout, independence of how it is asked for."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.sampling import NoiseRole, gumbel, gumbel_at, seed_tensor, uniform
from paceline.sampling.noise import philox4x32, uniform_scalar

# The three philox4x32-10 lines of Random123's known-answer file: counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]

FROZEN_UNIFORMS = [0.18467483833596188, 0.6590814617868629]
FROZEN_GUMBELS = [1.5628606081008911, -0.5382359623908997, -0.17574310302734375]


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


def test_a_seeded_text_stays_what_it_was() -> None:
    """Frozen values: a change here changes the text of every stored seed."""
    assert uniform(42, [100], NoiseRole.ACCEPT, 2)[0].tolist() == FROZEN_UNIFORMS
    assert gumbel(42, [100], NoiseRole.TARGET, 3)[0].tolist() == pytest.approx(FROZEN_GUMBELS, rel=1e-6)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_words_stay_finite(dtype: torch.dtype) -> None:
    from paceline.sampling.noise import _gumbel_of

    noise = _gumbel_of(torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1]), dtype)
    assert noise.dtype == dtype
    assert bool(noise.isfinite().all())
    assert noise.tolist() == sorted(noise.tolist(), reverse=True)
    assert float(noise[0]) == pytest.approx(33 * math.log(2), rel=1e-6)


def test_float32_and_float64_agree() -> None:
    single = gumbel(1, range(8), NoiseRole.TARGET, 4096)
    double = gumbel(1, range(8), NoiseRole.TARGET, 4096, torch.float64)
    difference = (single.double() - double).abs()
    assert float(difference[double > -1.5].max()) < 5e-6
    # Below, float32 has fewer digits; numbers that low lose every race.
    assert float(difference.max()) < 0.1


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
