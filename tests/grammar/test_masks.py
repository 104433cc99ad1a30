"""Packed masks: what is allowed keeps its bits, on every device and at every width."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.grammar.masks import forbid, forbid_on_device, num_words


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 61, 49_152])
@pytest.mark.parametrize(
    ("device", "way"),
    [
        ("cpu", forbid),
        ("cpu", forbid_on_device),
        pytest.param("cuda", forbid, marks=pytest.mark.gpu),
    ],
)
def test_bits_become_minus_infinity(device, way, vocab_size: int) -> None:
    chance = np.random.default_rng(vocab_size)
    bits = chance.random((3, vocab_size)) < 0.3
    bits[1] = True
    padded = np.zeros((3, 32 * num_words(vocab_size)), dtype=bool)
    padded[:, :vocab_size] = bits
    packed = np.packbits(padded, axis=1, bitorder="little").view(np.int32)
    logits = torch.randn(3, vocab_size)
    masked = logits.to(device, copy=True)
    way(masked, packed)
    assert torch.equal(masked.cpu(), torch.where(torch.from_numpy(bits), logits, -torch.inf))
