"""Counter-based noise: the same numbers on every device, in any order, from (seed, position, role) alone.

Responsible for: Philox4x32-10 in torch integer operations, and the uniform and Gumbel numbers made from its
words.

Deliberately does not know: logits, models, which decision a number is for. There is no state and no global
generator.

Called by: `choices` and `rejection`; drafters reach it through them.

Layout (part of the contract between drafter and target; changing it changes every seeded text):
    key     = (seed bits 0..31, seed bits 32..63)
    counter = (block, role, position bits 0..31, position bits 32..63)
    One block gives four 32-bit words. Gumbel number i (i is a target token id) comes from word i % 4 of block
    i // 4. Uniform number i comes from words 2 * (i % 2) and 2 * (i % 2) + 1 of block i // 2: 32 high and 20
    low bits.

This is noise version 1. `docs/noise.md` describes it for those who implement it elsewhere, with test vectors. Every
number is a function of its words by operations that IEEE 754 rounds one at a time (addition, multiplication, division,
conversion) and integer operations, so it has the same bits wherever it is computed. Do not compile these functions with
a compiler that contracts products and sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from paceline.sampling import kernels

_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_MASK = 0xFFFFFFFF

# ln f = t (2 + z R(z)) with t = (f - 1) / (f + 1) and z = t * t, for f from sqrt(1/2) to sqrt(2), so z from 0 to
# (3 - sqrt(8))^2. R interpolates (2 artanh(t) / t - 2) / z at the six Chebyshev nodes of that interval, made one part
# in ten thousand wider; computed with fifty digits, rounded to float64. The relative error of ln f is below 7e-16.
_LOG_SERIES = (
    0.6666666666666208,
    0.400000000112122,
    0.2857142413651635,
    0.22222862476849542,
    0.18140185202493248,
    0.166219470901774,
)
_LN_2 = 0.6931471805599453
_SQRT_HALF_BITS = 0x3FE6A09E667F3BCD  # of the float64 nearest to sqrt(1/2)

_CHUNK = 8192  # blocks at a time: six int64 buffers of this size stay in a core's second-level cache


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


def philox4x32(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 (Salmon et al., SC 2011, section 3.3) on int64 tensors that hold 32-bit words.

    Args:
        counter: four broadcastable int64 tensors with values in [0, 2**32).
        key: two broadcastable int64 tensors with values in [0, 2**32).

    Returns:
        Four int64 tensors of the broadcast shape with values in [0, 2**32).
    """
    word_0, word_1, word_2, word_3 = counter
    key_0, key_1 = key
    for _ in range(_ROUNDS):
        # A 64-bit product wraps to a negative number; masking the shifted value restores the unsigned high
        # word.
        product_0 = word_0 * _MULTIPLIER_0
        product_1 = word_2 * _MULTIPLIER_1
        high_0 = (product_0 >> 32).bitwise_and_(_MASK)
        high_1 = (product_1 >> 32).bitwise_and_(_MASK)
        word_0 = high_1 ^ word_1 ^ key_0
        word_1 = product_1.bitwise_and_(_MASK)
        word_2 = high_0 ^ word_3 ^ key_1
        word_3 = product_0.bitwise_and_(_MASK)
        key_0 = (key_0 + _WEYL_0) & _MASK
        key_1 = (key_1 + _WEYL_1) & _MASK
    shape = torch.broadcast_shapes(word_0.shape, word_1.shape, word_2.shape, word_3.shape)
    return word_0.expand(shape), word_1.expand(shape), word_2.expand(shape), word_3.expand(shape)


def seed_tensor(seeds: Sequence[int], device: torch.device | str | None = None) -> Tensor:
    """Unsigned 64-bit seeds as an int64 tensor of the same bits."""
    return torch.tensor(
        [seed - 2**64 if seed >= 2**63 else seed for seed in seeds], dtype=torch.int64, device=device
    )


def uniform(
    seeds: int | Tensor,
    positions: Sequence[int] | Tensor,
    role: NoiseRole,
    n: int,
    device: torch.device | str | None = None,
) -> Tensor:
    """Uniform numbers strictly between 0 and 1, on a grid of 2**-52 shifted by half a step.

    Args:
        seeds: one seed for all rows, or an int64 tensor [rows] as `seed_tensor` makes it.
        positions: [rows] absolute position of the token being decided.
        role: which draw.
        n: numbers per row.
        device: where to compute; default the device of the tensors given, else the CPU.

    Returns:
        [rows, n] float64
    """
    words = _words(seeds, positions, role, (n + 1) // 2, device)  # [rows, blocks, 4] int64
    high, low = words[:, :, 0::2], words[:, :, 1::2]  # [rows, blocks, 2]
    integers = (high << 20) | (low >> 12)  # 52 bits, so that adding a half is exact in float64
    return ((integers.to(torch.float64) + 0.5) * 2.0**-52).flatten(1)[:, :n]


def uniform_scalar(seed: int, position: int, role: NoiseRole, index: int = 0) -> float:
    """Number ``index`` of those that `uniform` gives for one row, without a tensor.

    A tensor operation costs microseconds however small it is, and a generator takes over a hundred of them.
    """
    library = kernels.load()
    if library is not None:
        number: float = library.pl_uniform(seed, position, role, index)
        return number
    words = [index >> 1, int(role), position & _MASK, (position >> 32) & _MASK]
    key_0, key_1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(_ROUNDS):
        product_0, product_1 = words[0] * _MULTIPLIER_0, words[2] * _MULTIPLIER_1
        words = [
            (product_1 >> 32) ^ words[1] ^ key_0,
            product_1 & _MASK,
            (product_0 >> 32) ^ words[3] ^ key_1,
            product_0 & _MASK,
        ]
        key_0, key_1 = (key_0 + _WEYL_0) & _MASK, (key_1 + _WEYL_1) & _MASK
    high, low = words[2:] if index & 1 else words[:2]
    return ((high << 20 | low >> 12) + 0.5) * 2.0**-52


def gumbel(
    seeds: int | Tensor,
    positions: Sequence[int] | Tensor,
    role: NoiseRole,
    n: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Standard Gumbel numbers, one per token id; always finite.

    The float32 number is the float64 number rounded.

    Returns:
        [rows, n] of ``dtype``
    """
    words = _words(seeds, positions, role, (n + 3) // 4, device)
    return _gumbel_of(words.flatten(1)[:, :n], dtype)


def gumbel_at(
    seeds: int | Tensor,
    positions: Sequence[int] | Tensor,
    role: NoiseRole,
    token_ids: Tensor,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The Gumbel numbers of some token ids only: what `gumbel` returns, gathered, without computing the rest.

    Args:
        seeds: as in `uniform`.
        positions: as in `uniform`.
        role: which draw.
        token_ids: [rows, m] int64, not negative.
        dtype: float32 or float64.

    Returns:
        [rows, m] of ``dtype``
    """
    counter, key = _counter_and_key(seeds, positions, role, token_ids >> 2, token_ids.device)
    words = torch.stack(philox4x32(counter, key), dim=-1)  # [rows, m, 4]
    return _gumbel_of(words.gather(2, (token_ids & 3).unsqueeze(2)).squeeze(2), dtype)


def _gumbel_of(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Standard Gumbel numbers from int64 tensors of 32-bit words, same shape.

    They fall from 22.87 at word 0 to -3.13 at the last word: strictly in float64, and never rise in float32, which was
    checked for all 2**32 words. Near word 0 lie the large numbers that win races.
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


def _words(
    seeds: int | Tensor,
    positions: Sequence[int] | Tensor,
    role: NoiseRole,
    num_blocks: int,
    device: torch.device | str | None,
) -> Tensor:
    """[rows, num_blocks, 4] int64: the words of blocks 0..num_blocks-1 for every row."""
    if device is None:
        tensors = [item for item in (positions, seeds) if isinstance(item, Tensor)]
        device = tensors[0].device if tensors else "cpu"
    device = torch.device(device)
    blocks = torch.arange(num_blocks, dtype=torch.int64, device=device).reshape(1, -1)
    counter, key = _counter_and_key(seeds, positions, role, blocks, device)
    rows = max(counter[2].shape[0], key[0].shape[0])
    out = torch.empty(rows, num_blocks, 4, dtype=torch.int64, device=device)
    chunk = max(1, _CHUNK // max(rows, 1)) if device.type == "cpu" else max(num_blocks, 1)
    for first in range(0, num_blocks, chunk):
        part = blocks[:, first : first + chunk]
        for index, word in enumerate(philox4x32((part, *counter[1:]), key)):
            out[:, first : first + chunk, index] = word
    return out


def _counter_and_key(
    seeds: int | Tensor,
    positions: Sequence[int] | Tensor,
    role: NoiseRole,
    blocks: Tensor,
    device: torch.device,
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Philox counter and key words: ``blocks`` as given, everything else [rows, 1] int64."""
    position = torch.as_tensor(positions, dtype=torch.int64, device=device).reshape(-1, 1)
    seed = (seeds if isinstance(seeds, Tensor) else seed_tensor([seeds])).to(device).reshape(-1, 1)
    role_word = torch.full_like(position, int(role))
    counter = (blocks, role_word, position & _MASK, (position >> 32) & _MASK)
    return counter, (seed & _MASK, (seed >> 32) & _MASK)
