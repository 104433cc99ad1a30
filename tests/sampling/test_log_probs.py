"""Log-probabilities against their definition, row by row."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.sampling.log_probs import token_log_probs


@pytest.mark.parametrize("num_rows", [0, 1, 7, 130])
@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_values_ranks_and_alternatives(num_rows: int, num_top: int) -> None:
    logits = torch.randn((num_rows, 31), generator=torch.Generator().manual_seed(num_rows)) * 4
    tokens = [(7 * row + 3) % 31 for row in range(num_rows)]
    found = token_log_probs(logits, tokens, num_top)
    assert found.top_token_ids.shape == found.top_log_probs.shape == (num_rows, num_top)
    for row, token in enumerate(tokens):
        values = [float(value) for value in logits[row]]
        total = math.log(sum(math.exp(value) for value in values))
        ordered = sorted(range(31), key=lambda i: -values[i])
        assert float(found.log_probs[row]) == pytest.approx(values[token] - total, abs=1e-5)
        assert int(found.ranks[row]) == ordered.index(token) + 1
        assert found.top_token_ids[row].tolist() == ordered[:num_top]
        for place, other in enumerate(ordered[:num_top]):
            assert float(found.top_log_probs[row, place]) == pytest.approx(values[other] - total, abs=1e-5)


def test_rows_do_not_depend_on_their_neighbours() -> None:
    logits = torch.randn((100, 4099), generator=torch.Generator().manual_seed(1))
    together = token_log_probs(logits, list(range(100)), 3)
    for row in (0, 17, 63, 64, 99):
        alone = token_log_probs(logits[row : row + 1], [row], 3)
        assert torch.equal(alone.log_probs, together.log_probs[row : row + 1])
        assert torch.equal(alone.top_log_probs, together.top_log_probs[row : row + 1])


def test_equal_logits_share_a_rank() -> None:
    found = token_log_probs(torch.tensor([[1.0, 2.0, 2.0, 0.0]]), [2], 0)
    assert found.ranks.tolist() == [1]


def test_a_part_keeps_rows_and_alternatives_together() -> None:
    found = token_log_probs(torch.eye(5), [0, 1, 2, 3, 4], 4).part(1, 3, 1)
    assert found.top_token_ids.tolist() == [[1], [2]]
    assert found.ranks.tolist() == [1, 1]


def test_rows_and_tokens_must_agree() -> None:
    with pytest.raises(ValueError, match="2 rows"):
        token_log_probs(torch.zeros(2, 3), [1], 0)
