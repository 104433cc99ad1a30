"""Joining a step's logits."""

from __future__ import annotations

import torch

from services.verifier.verdicts import joined


def test_neighbours_are_joined_without_a_copy() -> None:
    step = torch.randn(9, 7)
    parts = list(step[1:8].split([2, 1, 4]))
    whole = joined(parts)
    assert torch.equal(whole, step[1:8])
    assert whole.data_ptr() == step[1].data_ptr()
    whole[0, 0] = 5.0
    assert float(step[1, 0]) == 5.0


def test_others_are_copied() -> None:
    step = torch.randn(9, 7)
    one, two, three = step.split([2, 3, 4])
    for parts in (
        [two, one, three],
        [one, three],
        [one, two.clone()],
        [step[:, :3], step[:, 3:6]],
        [one, one],
    ):
        assert torch.equal(joined(parts), torch.cat(parts))
    assert joined([two]).data_ptr() == two.data_ptr()
