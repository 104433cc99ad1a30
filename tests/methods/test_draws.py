"""Drafting for modes that verify draws: what is sent is what was drawn from, the drafter's own distribution."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from paceline.drafts import DraftEntry, DrawRule
from paceline.methods.drafter import Drafter, DraftRequest
from paceline.methods.sibling_chain import num_draws
from paceline.sampling.distribution import DraftDistribution
from paceline.sampling.draws import draw_children
from paceline.sampling.params import SamplingParams, VerifyMode
from paceline.sampling.probabilities import target_probs
from paceline.sampling.row_params import RowParams
from tests.methods.conftest import DRAFT_IDS, Target, text

Load = Callable[[Path], Drafter]
TOKENS = text(12, seed=4)


def params(mode: VerifyMode = VerifyMode.REJECTION, seed: int = 7, top_k: int = 0) -> SamplingParams:
    return SamplingParams(temperature=0.7, top_k=top_k, seed=seed, mode=mode)


@pytest.fixture(
    params=[
        "deepseek_mtp",
        "deepseek_mtp3",
        "dflash",
        "dspark",
        "eagle1",
        "eagle3",
        "gemma4_mtp",
        "independent",
        "medusa1",
        "p_eagle",
        "pard1",
        "pard2",
    ]
)
def started(
    request: pytest.FixtureRequest, load: Load, drafter_dirs: dict[str, Path], target: Target
) -> Drafter:
    """A drafter of each method that follows sequences 1 and 2."""
    drafter = load(drafter_dirs[request.param])
    for sequence_id in (1, 2):
        drafter.open(sequence_id, TOKENS)
        drafter.feed(sequence_id, 0, target.features(drafter, TOKENS)[:-1])
    return drafter


def draft(drafter: Drafter, *requests: DraftRequest) -> list[DraftEntry]:
    entries = drafter.draft(requests)
    assert all(entry is not None for entry in entries)
    return [entry for entry in entries if entry is not None]


def dist_of(entry: DraftEntry, node: int) -> DraftDistribution:
    assert entry.draft_dists is not None
    draws = entry.draft_dists[node]
    assert draws is not None
    assert isinstance(draws.distribution, DraftDistribution)
    return draws.distribution


@pytest.mark.parametrize("mode", [VerifyMode.REJECTION, VerifyMode.BLOCK])
def test_each_token_is_the_keyed_draw_from_what_is_sent(started: Drafter, mode: VerifyMode) -> None:
    (entry,) = draft(started, DraftRequest(1, 5, sampling=params(mode)))
    assert entry.parents == (-1, 0, 1, 2, 3)
    assert len(set(entry.tokens)) > 1
    for node, token in enumerate(entry.tokens):
        dist, position = dist_of(entry, node), len(TOKENS) + node
        again = draw_children(dist, DrawRule.WITHOUT_REPLACEMENT, 1, params(mode), len(TOKENS), position)
        assert again.tokens == (token,)


def test_the_distribution_is_the_small_models_own_under_the_requests_parameters(
    load: Load, independent_dir: Path
) -> None:
    drafter = load(independent_dir)
    drafter.open(1, TOKENS)
    wanted = params(top_k=20)
    (entry,) = draft(drafter, DraftRequest(1, 4, sampling=wanted))
    model = LlamaForCausalLM.from_pretrained(independent_dir / "model", dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([TOKENS + list(entry.tokens)])).logits[0, len(TOKENS) - 1 : -1]
    probs = target_probs(logits, RowParams.build([wanted], [4]))
    for node in range(4):
        dist = dist_of(entry, node)
        found = torch.zeros(probs.shape[1], dtype=torch.float64).index_add_(0, dist.token_ids, dist.probs)
        assert float((found - probs[node]).abs().max()) < 2e-5  # rounding to 16 bits
        assert dist.token_ids.numel() <= 20


def test_a_support_is_cut_to_the_likeliest_and_named_by_target_ids(
    load: Load, eagle3_dir: Path, target: Target
) -> None:
    entries = []
    for size in (64, 3):
        drafter = load(eagle3_dir)
        drafter.open(1, TOKENS)
        drafter.feed(1, 0, target.features(drafter, TOKENS)[:-1])
        entries += draft(drafter, DraftRequest(1, 1, sampling=params(), support_size=size))
    whole, cut = dist_of(entries[0], 0), dist_of(entries[1], 0)
    assert set(whole.token_ids.tolist()) <= set(DRAFT_IDS)
    assert torch.equal(cut.token_ids, whole.token_ids[:3])
    assert torch.allclose(cut.probs, whole.probs[:3] / whole.probs[:3].sum(), atol=1e-12)
    assert whole.probs.tolist() == sorted(whole.probs.tolist(), reverse=True)


def test_spare_nodes_are_siblings_beside_the_chain(started: Drafter) -> None:
    (chain,) = draft(started, DraftRequest(1, 3, sampling=params()))
    (comb,) = draft(started, DraftRequest(2, 3, max_nodes=7, sampling=params()))
    assert comb.parents == (-1, -1, -1, 0, 0, 3, 3)
    assert tuple(comb.tokens[node] for node in (0, 3, 5)) == chain.tokens
    for parent in (-1, 0, 3):
        siblings = [token for token, p in zip(comb.tokens, comb.parents, strict=True) if p == parent]
        assert len(set(siblings)) == len(siblings)


def test_blocks_have_no_siblings(started: Drafter) -> None:
    (block,) = draft(started, DraftRequest(1, 3, max_nodes=7, sampling=params(VerifyMode.BLOCK)))
    assert block.draft_dists is not None
    assert block.parents == (-1, 0, 1)


def test_a_longer_wish_goes_on_from_the_same_draws(started: Drafter) -> None:
    (short,) = draft(started, DraftRequest(1, 2, max_nodes=4, sampling=params()))
    (long,) = draft(started, DraftRequest(1, 4, sampling=params()))
    assert long.tokens[:4] == short.tokens
    assert long.draft_dists is not None
    assert short.draft_dists is not None
    assert long.draft_dists[:4] == short.draft_dists
    assert long.parents == (-1, -1, 0, 0, 2, 4)


@pytest.mark.parametrize(
    ("sampling", "rule"),
    [
        (SamplingParams(temperature=0.0), None),
        (params(VerifyMode.COUPLED), None),
        (params(VerifyMode.TYPICAL), None),
        (params(VerifyMode.REJECTION), DrawRule.TOP),
        (params(VerifyMode.BLOCK), DrawRule.TOP),
    ],
)
def test_what_was_not_drawn_travels_without_a_distribution(
    started: Drafter, sampling: SamplingParams, rule: DrawRule | None
) -> None:
    (entry,) = draft(started, DraftRequest(1, 3, sampling=sampling, rule=rule))
    assert entry.draft_dists is None
    if sampling.resolved_mode is not VerifyMode.COUPLED:  # the likeliest tokens
        (greedy,) = draft(started, DraftRequest(2, 3, sampling=SamplingParams(temperature=0.0)))
        assert entry.tokens == greedy.tokens


def test_one_batch_may_mix_modes(started: Drafter) -> None:
    drawn, greedy = draft(
        started,
        DraftRequest(1, 3, sampling=params()),
        DraftRequest(2, 4, sampling=SamplingParams(temperature=0.0)),
    )
    assert drawn.draft_dists is not None
    assert greedy.draft_dists is None
    assert (len(drawn.tokens), len(greedy.tokens)) == (3, 4)


def test_spare_nodes_go_where_the_chain_begins() -> None:
    assert [num_draws(place, 3, 7) for place in range(3)] == [3, 2, 2]
    assert [num_draws(place, 4, 4) for place in range(4)] == [1] * 4
    assert [num_draws(place, 4, 0) for place in range(4)] == [1] * 4
