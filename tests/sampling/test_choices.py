"""The choice of a row where drafts have no say in it."""

from __future__ import annotations

import pytest
import torch

from paceline.sampling.choices import largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_largest_is_the_first_of_equals(dtype: torch.dtype) -> None:
    rows = torch.randn(40, 1003, generator=torch.Generator().manual_seed(1), dtype=dtype)
    rows[::2] = rows[::2].round()  # many ties
    rows[5] = -torch.inf
    rows[5, [70, 900]] = 3.0
    expected = [max(range(1003), key=lambda index: (row[index], -index)) for row in rows.tolist()]
    assert largest(rows).tolist() == expected
    assert largest(rows[:, ::3]).tolist() == rows[:, ::3].argmax(dim=-1).tolist()
