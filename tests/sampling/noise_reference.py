"""Noise version 1 in Python numbers alone, from docs/noise.md: independent of torch and of the C kernels.

Run as a program it prints the test vectors that `noise_vectors.json` holds.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

MASK = 0xFFFFFFFF
SERIES = [
    0.6666666666666208,
    0.400000000112122,
    0.2857142413651635,
    0.22222862476849542,
    0.18140185202493248,
    0.166219470901774,
]
LN_2 = 0.6931471805599453
KEYS = [(0, 0, 0), (42, 100, 0), (42, 100, 1), (2**64 - 1, 2**40 + 7, 2), (0x0123456789ABCDEF, 8191, 3)]
TOKENS = [0, 1, 2, 3, 4, 5, 31, 32, 49_151, 262_143]
WORDS = [0, 1, 2, 3, 0xFF, 2**24 - 1, 2**30, 0x5DA01CF0, 2**31 - 1, 2**31, 0xA1D2A7E7, 2**32 - 2, 2**32 - 1]


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-10."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(second >> 32) ^ c[1] ^ k[0], second & MASK, (first >> 32) ^ c[3] ^ k[1], first & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


def block(seed: int, position: int, role: int, number: int) -> list[int]:
    """The four words of a block."""
    return philox([number, role, position & MASK, position >> 32], [seed & MASK, seed >> 32])


def word_of(seed: int, position: int, role: int, token: int) -> int:
    """The word of a token id."""
    return block(seed, position, role, token // 4)[token % 4]


def log(y: float) -> float:
    """The logarithm of docs/noise.md; Python's float arithmetic rounds every operation."""
    bits = struct.unpack("<q", struct.pack("<d", y))[0]
    power = (bits - 0x3FE6A09E667F3BCD) >> 52
    f = struct.unpack("<d", struct.pack("<q", bits - (power << 52)))[0]
    t = (f - 1.0) / (f + 1.0)
    z = t * t
    r = SERIES[5]
    for coefficient in SERIES[4::-1]:
        r = r * z + coefficient
    return (z * r + 2.0) * t + power * LN_2


def gumbel_of(word: int) -> float:
    """The float64 Gumbel number of a word."""
    return -log(-log(1.0 - (2 * word + 1) * 2.0**-33))


def gumbel32_of(word: int) -> float:
    """The float32 Gumbel number of a word, as a Python float."""
    return float(np.float32(gumbel_of(word)))


def uniform_of(words: Sequence[int]) -> float:
    """The uniform number of two words."""
    return ((words[0] << 20 | words[1] >> 12) + 0.5) * 2.0**-52


def mass_of(x: float) -> int:
    """2**40 exp(x) for a float32 x <= 0, by float32 operations."""
    f = np.float32
    y = f(max(x, -60.0)) * f(1.4426950216293335)
    power = np.rint(y)
    r = y - power
    p = f(0.00015453163359779865)
    for c in (0.0013390863314270973, 0.009618083015084267, 0.055503569543361664, 0.24022650718688965):
        p = p * r + f(c)
    p = (p * r + f(0.6931471824645996)) * r + f(1.0)
    return int(math.ldexp(float(p), int(power) + 40))


def vectors() -> dict[str, Any]:
    """What `noise_vectors.json` holds."""
    draws = []
    for seed, position, role in KEYS:
        uniforms = [uniform_of(block(seed, position, role, n // 2)[n % 2 * 2 :][:2]) for n in range(3)]
        words = {token: word_of(seed, position, role, token) for token in TOKENS}
        draws.append(
            {
                "seed": f"{seed:#x}",
                "position": position,
                "role": role,
                "uniforms": [value.hex() for value in uniforms],
                "tokens": TOKENS,
                "words": [f"{word:08x}" for word in words.values()],
                "gumbels": [gumbel32_of(word).hex() for word in words.values()],
            }
        )
    by_word = [
        {"word": f"{word:08x}", "float64": gumbel_of(word).hex(), "float32": gumbel32_of(word).hex()}
        for word in WORDS
    ]
    return {"version": 1, "draws": draws, "by_word": by_word}


if __name__ == "__main__":
    found = vectors()
    lines = [
        f' "{name}": [\n' + ",\n".join(f"  {json.dumps(item)}" for item in found[name]) + "\n ]"
        for name in ("draws", "by_word")
    ]
    print("{\n" + f' "version": {found["version"]},\n' + ",\n".join(lines) + "\n}")  # noqa: T201
