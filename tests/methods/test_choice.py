"""The tokens that a drafter ranks: those that the target's own race would choose, one after another."""

from __future__ import annotations

import pytest
import torch

from paceline.methods.choice import rank_by_race, rank_children
from paceline.sampling.noise import NoiseRole, gumbel_at
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import process_logits
from paceline.sampling.row_params import RowParams

VOCAB, NUM_IDS = 5000, 700


def rows(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a reduced vocabulary, and its ids."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(VOCAB, generator=generator)[:NUM_IDS].sort().values
    return 3 * torch.randn(count, NUM_IDS, generator=generator), ids


@pytest.mark.parametrize("has_ids", [False, True])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 12}, {"min_p": 0.05}])
def test_ranks_are_those_of_the_sums(has_ids: bool, filters: dict[str, float]) -> None:
    """Against the definition: every place's logit and noise added up, and sorted."""
    logits, ids = rows(6, 3)
    params = [SamplingParams(temperature=0.8, seed=100 + i, **filters) for i in range(6)]  # type: ignore[arg-type]
    positions = list(range(20, 26))
    part = RowParams.build(params, [1] * 6, logits.device)
    processed = process_logits(logits, part)
    of = ids if has_ids else torch.arange(NUM_IDS)
    sums = processed + gumbel_at(part.seeds, torch.tensor(positions), NoiseRole.TARGET, of.expand(6, -1))
    best = sums.topk(5, dim=-1)
    log_chances, chosen = rank_by_race(logits, ids if has_ids else None, positions, params, 5)
    count = len(chosen[0])  # as many as every row has left
    assert count == min(5, int(processed.isfinite().sum(dim=-1).min()))
    assert chosen == best.indices[:, :count].tolist()
    torch.testing.assert_close(torch.tensor(log_chances), best.values[:, :count].log_softmax(-1))


def test_a_row_that_has_one_token_left_has_one_rank() -> None:
    logits, _ = rows(2, 5)
    params = [SamplingParams(temperature=0.8, seed=1, top_k=1), SamplingParams(temperature=0.8, seed=2)]
    log_chances, chosen = rank_by_race(logits, None, [4, 5], params, 4)
    assert [len(row) for row in chosen] == [1, 1]
    assert chosen[0] == [int(logits[0].argmax())]
    assert log_chances == [[0.0], [0.0]]


def test_greedy_rows_beside_coupled_ones_are_ranked_by_logits() -> None:
    logits, ids = rows(3, 9)
    params = [SamplingParams(temperature=t, seed=8) for t in (0.0, 0.8, 0.0)]
    _, chosen = rank_children(logits, ids, [7, 8, 9], params, 4)
    assert [chosen[0], chosen[2]] == logits[[0, 2]].topk(4).indices.tolist()
    assert chosen[1] == rank_by_race(logits[1:2], ids, [8], params[1:2], 4)[1][0]
