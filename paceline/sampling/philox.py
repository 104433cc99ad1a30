"""Philox4x32-10 (Salmon et al., SC 2011, section 3.3): four 32-bit words from a counter and a key, without state.

Responsible for: the rounds in torch integer operations and in Python integers, and the layout of counter and key.

Deliberately does not know: what the words are used for. `noise` makes numbers of them and documents the layout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_MASK = 0xFFFFFFFF

_CHUNK = 8192  # blocks at a time: six int64 buffers of this size stay in a core's second-level cache


def philox4x32(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 on int64 tensors of 32-bit words.

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


def philox4x32_scalar(seed: int, position: int, role: int, block: int) -> list[int]:
    """The four words of one block, without tensors."""
    words = [block, int(role), position & _MASK, (position >> 32) & _MASK]
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
    return words


def seed_tensor(seeds: Sequence[int], device: torch.device | str | None = None) -> Tensor:
    """Unsigned 64-bit seeds as an int64 tensor of the same bits."""
    return torch.tensor(
        [seed - 2**64 if seed >= 2**63 else seed for seed in seeds], dtype=torch.int64, device=device
    )


def random_words(
    seeds: int | Tensor,
    positions: Sequence[int] | Tensor,
    role: int,
    num_blocks: int,
) -> Tensor:
    """[rows, num_blocks, 4] int64: the words of blocks 0..num_blocks-1 for every row."""
    tensors = [item for item in (positions, seeds) if isinstance(item, Tensor)]
    device = tensors[0].device if tensors else torch.device("cpu")
    blocks = torch.arange(num_blocks, dtype=torch.int64, device=device).reshape(1, -1)
    counter, key = counter_and_key(seeds, positions, role, blocks, device)
    rows = max(counter[2].shape[0], key[0].shape[0])
    out = torch.empty(rows, num_blocks, 4, dtype=torch.int64, device=device)
    chunk = max(1, _CHUNK // max(rows, 1)) if device.type == "cpu" else max(num_blocks, 1)
    for first in range(0, num_blocks, chunk):
        part = blocks[:, first : first + chunk]
        for index, word in enumerate(philox4x32((part, *counter[1:]), key)):
            out[:, first : first + chunk, index] = word
    return out


def counter_and_key(
    seeds: int | Tensor,
    positions: Sequence[int] | Tensor,
    role: int,
    blocks: Tensor,
    device: torch.device,
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Philox counter and key words: ``blocks`` as given, all others [rows, 1] int64."""
    position = torch.as_tensor(positions, dtype=torch.int64, device=device).reshape(-1, 1)
    seed = (seeds if isinstance(seeds, Tensor) else seed_tensor([seeds])).to(device).reshape(-1, 1)
    role_word = torch.full_like(position, int(role))
    counter = (blocks, role_word, position & _MASK, (position >> 32) & _MASK)
    return counter, (seed & _MASK, (seed >> 32) & _MASK)
