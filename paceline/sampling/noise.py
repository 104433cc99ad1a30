"""Counter-based noise: the same numbers on every device, in any order, from (seed, position, role) alone.

Responsible for: the uniform and Gumbel numbers made from the words of `philox`.

Deliberately does not know: logits, models, which decision a number is for. There is no state and no global
generator.

Called by: `choices` and the modes that verify draws; drafters use it through them.

Layout (part of the contract between drafter and target; changing it changes every seeded text):
    key     = (seed bits 0..31, seed bits 32..63)
    counter = (block, role, position bits 0..31, position bits 32..63)
    One block gives four 32-bit words. Gumbel number i (i is a target token id) comes from word i % 4 of block
    i // 4. Uniform number i comes from words 2 * (i % 2) and 2 * (i % 2) + 1 of block i // 2: 32 high and 20
    low bits.

This is noise version 1. `docs/noise.md` describes it for other implementations, with test vectors. Every number
is computed from its words by operations that IEEE 754 rounds one at a time (addition, multiplication, division,
conversion) and by integer operations, so it has the same bits everywhere. Do not compile these functions with a
compiler that contracts products and sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from paceline.sampling import kernels
from paceline.sampling.philox import counter_and_key, philox4x32, philox4x32_scalar, random_words, seed_tensor

__all__ = ["NoiseRole", "gumbel", "gumbel_at", "seed_tensor", "uniform", "uniform_scalar"]


# ln f = t (2 + z R(z)) with t = (f - 1) / (f + 1) and z = t * t, for f from sqrt(1/2) to sqrt(2), so z from 0
# to (3 - sqrt(8))^2. R interpolates (2 artanh(t) / t - 2) / z at the six Chebyshev nodes of that interval,
# made one part in ten thousand wider; computed with fifty digits, rounded to float64. The relative error of
# ln f is below 7e-16.
_LOG_SERIES = (
    0.6666666666666208,
    0.400000000112122,
    0.2857142413651635,
    0.22222862476849542,
    0.18140185202493248,
    0.166219470901774,
)
_LN_2 = 0.6931471805599453
_SQRT_HALF_BITS = 0x3FE6A09E667F3BCD  # bits of the float64 nearest to sqrt(1/2)


class NoiseRole(IntEnum):
    """Which of several independent draws at one position."""

    TARGET = 0
    """The choice of a token in coupled mode. Drafters use the same role: that is the coupling."""
    ACCEPT = 1
    """Whether a drafted token is accepted, in rejection and block mode."""
    FINAL = 2
    """The recovered or bonus token in rejection, block and typical mode."""
    DRAFT = 3
    """A drafter's own draw in rejection and block mode, independent of all the target's."""


def uniform(
    seeds: int | Tensor,
    positions: Sequence[int] | Tensor,
    role: NoiseRole,
    n: int,
) -> Tensor:
    """Uniform numbers strictly between 0 and 1, on a grid of 2**-52 shifted by half a step.

    Args:
        seeds: one seed for all rows, or an int64 tensor [rows] as `seed_tensor` makes it.
        positions: [rows] absolute position of the token being decided.
        role: which draw.
        n: numbers per row.

    Returns:
        [rows, n] float64
    """
    words = random_words(seeds, positions, role, (n + 1) // 2)  # [rows, blocks, 4] int64
    high, low = words[:, :, 0::2], words[:, :, 1::2]  # [rows, blocks, 2]
    integers = (high << 20) | (low >> 12)  # 52 bits, so that adding a half is exact in float64
    return ((integers.to(torch.float64) + 0.5) * 2.0**-52).flatten(1)[:, :n]


def uniform_scalar(seed: int, position: int, role: NoiseRole, index: int = 0) -> float:
    """Number ``index`` of those that `uniform` gives for one row, without a tensor.

    A tensor operation costs microseconds however small it is, and a drafter draws more than a hundred numbers.
    """
    library = kernels.load()
    if library is not None:
        number: float = library.pl_uniform(seed, position, role, index)
        return number
    words = philox4x32_scalar(seed, position, role, index >> 1)
    high, low = words[2:] if index & 1 else words[:2]
    return ((high << 20 | low >> 12) + 0.5) * 2.0**-52


def gumbel(
    seeds: int | Tensor,
    positions: Sequence[int] | Tensor,
    role: NoiseRole,
    n: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Standard Gumbel numbers, one per token id; always finite.

    The float32 number is the float64 number rounded.

    Returns:
        [rows, n] of ``dtype``
    """
    words = random_words(seeds, positions, role, (n + 3) // 4)
    return _gumbel_of(words.flatten(1)[:, :n], dtype)


def gumbel_at(
    seeds: int | Tensor,
    positions: Sequence[int] | Tensor,
    role: NoiseRole,
    token_ids: Tensor,
) -> Tensor:
    """The Gumbel numbers of some token ids only: what `gumbel` returns, gathered, without computing the rest.

    Args:
        seeds: as in `uniform`.
        positions: as in `uniform`.
        role: which draw.
        token_ids: [rows, m] int64, not negative.

    Returns:
        [rows, m] float32
    """
    counter, key = counter_and_key(seeds, positions, role, token_ids >> 2, token_ids.device)
    words = torch.stack(philox4x32(counter, key), dim=-1)  # [rows, m, 4]
    return _gumbel_of(words.gather(2, (token_ids & 3).unsqueeze(2)).squeeze(2), torch.float32)


def _gumbel_of(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Standard Gumbel numbers from int64 tensors of 32-bit words, same shape.

    They fall from 22.87 at word 0 to -3.13 at the last word: strictly in float64, and without ever rising in
    float32, which was checked for all 2**32 words. The large numbers, which win races, are near word 0.
    """
    # Both steps are exact: the uniform number has 33 bits.
    uniforms = 1.0 - (words.to(torch.float64) * 2.0 + 1.0) * 2.0**-33
    return (-_log(-_log(uniforms))).to(dtype)


def _log(y: Tensor) -> Tensor:
    """Natural logarithms of positive normal float64 numbers, the same bits on every device."""
    bits = y.view(torch.int64)
    power = (bits - _SQRT_HALF_BITS) >> 52
    f = (bits - (power << 52)).view(torch.float64)  # y = 2**power * f
    t = (f - 1.0).div_(f + 1.0)
    z = t * t
    r = z * _LOG_SERIES[-1]
    for coefficient in _LOG_SERIES[-2:0:-1]:
        r.add_(coefficient).mul_(z)
    r.add_(_LOG_SERIES[0])
    return r.mul_(z).add_(2.0).mul_(t).add_(power.to(torch.float64).mul_(_LN_2))
