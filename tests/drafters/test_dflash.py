"""DFlash serving: equal to a slow reference and to its training objective, through rejections, batches and wishes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from paceline.drafters import (
    CheckpointError,
    Drafter,
    DrafterConfig,
    DrafterError,
    DraftRequest,
    OutcomeRequest,
    load_drafter,
)
from paceline.drafters.checkpoint import save_drafter
from paceline.drafters.choice import choose_chain_tokens
from paceline.drafters.dflash import DFlashDrafter
from paceline.drafters.dflash_layer import BlockRows
from paceline.models import model_fingerprint
from paceline.sampling import SamplingParams, VerifyMode
from paceline.training.data import Batch
from paceline.training.dflash import DFlashObjective
from paceline.training.eagle3 import TargetFacts
from paceline.trie import DraftEntry, DrawRule
from tests.drafters.conftest import DFLASH_SHAPE as SHAPE
from tests.drafters.conftest import DRAFT_IDS, TAP_LAYERS, VOCAB, Target, text
from tests.drafters.dflash_checkpoint import random_tensors, reference_states, save

Load = Callable[[Path], Drafter]
LAYOUTS = {
    "infilling": SHAPE,
    "anchor_first": replace(SHAPE, anchor_first=True),
    "plain_heads": replace(SHAPE, head_norms=False),
}


@pytest.fixture(scope="module")
def embedding(target_dir: Path) -> Tensor:
    """The target's, which is its head too."""
    model = LlamaForCausalLM.from_pretrained(target_dir, dtype=torch.float32)
    return model.model.embed_tokens.weight.detach()


@pytest.fixture
def drafter(load: Load, dflash_dir: Path) -> DFlashDrafter:
    drafter = load(dflash_dir)
    assert isinstance(drafter, DFlashDrafter)
    return drafter


def _start(drafter: Drafter, target: Target, sequence_id: int, tokens: list[int]) -> None:
    drafter.open(sequence_id, tokens)
    drafter.feed(sequence_id, 0, target.features(drafter, tokens)[:-1])


def _entry(drafter: Drafter, sequence_id: int, num_tokens: int, **wish: object) -> DraftEntry:
    (entry,) = drafter.draft([DraftRequest(sequence_id, num_tokens, **wish)])  # type: ignore[arg-type]
    assert entry is not None
    return entry


def _draft(drafter: Drafter, sequence_id: int, num_tokens: int) -> tuple[int, ...]:
    return _entry(drafter, sequence_id, num_tokens).tokens


def _count_context(drafter: DFlashDrafter) -> list[list[int]]:
    """New context rows of each sequence in every pass from now on."""
    seen: list[list[int]] = []
    forward = drafter._blocks.forward

    def counting(rows: list[BlockRows]) -> Tensor:
        seen.append([part.context.shape[0] for part in rows])
        return forward(rows)

    drafter._blocks.forward = counting  # type: ignore[method-assign, assignment]
    return seen


@pytest.mark.parametrize("length", [2, 9, 33])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_chain_equals_reference(
    load: Load, target: Target, target_dir: Path, embedding: Tensor, tmp_path: Path, length: int, layout: str
) -> None:
    shape = LAYOUTS[layout]
    tensors = random_tensors(shape, DRAFT_IDS, seed=5)
    drafter = load(save(tmp_path, shape, tensors, model_fingerprint(target_dir), TAP_LAYERS, 64))
    tokens = text(length, seed=length)
    _start(drafter, target, 7, tokens)
    entry = _entry(drafter, 7, 10)
    states = reference_states(shape, tensors, embedding, target.taps(tokens)[:-1], tokens)
    logits = states @ embedding[DRAFT_IDS].T
    assert len(entry.tokens) == (7 if layout == "anchor_first" else 6)
    assert list(entry.tokens) == [DRAFT_IDS[i] for i in logits.argmax(-1).tolist()]
    expected = logits.log_softmax(-1).max(-1).values
    torch.testing.assert_close(torch.tensor(entry.log_probs), expected, rtol=1e-3, atol=1e-3)
    assert len(set(entry.tokens)) > 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_serving_equals_the_training_mask_of_the_last_anchor(
    load: Load, target: Target, target_dir: Path, embedding: Tensor, tmp_path: Path, layout: str
) -> None:
    shape = LAYOUTS[layout]
    tensors = random_tensors(shape, DRAFT_IDS, seed=5)
    drafter = load(save(tmp_path, shape, tensors, model_fingerprint(target_dir), TAP_LAYERS, 64))
    assert isinstance(drafter, DFlashDrafter)
    tokens = text(20, seed=3)
    _start(drafter, target, 1, tokens)
    _draft(drafter, 1, 6)
    block = drafter._sequences[1].round
    served = torch.cat([block.state(depth) for depth in range(shape.num_drafts)])
    # What stands behind the anchor is unknown to serving, and must not matter; nor must other anchors' blocks.
    whole = torch.tensor([[*tokens, *text(7, seed=30)]])
    batch = Batch(
        tokens=whole,
        top_tokens=torch.zeros_like(whole),
        is_answer=torch.ones_like(whole, dtype=torch.bool),
        is_greedy=torch.ones(1, dtype=torch.bool),
        lengths=torch.tensor([whole.shape[1]]),
        taps=target.taps(whole[0].tolist())[None],
        hidden=None,
    )
    objective = DFlashObjective(
        shape,
        {k: tensors[k] for k in shape.parameter_shapes()},
        embedding,
        embedding,
        torch.tensor(DRAFT_IDS),
        torch.ones(3 * 64),
        TargetFacts("", "tiny", tuple(TAP_LAYERS), 64),
        dtype=torch.float32,
    )
    with torch.no_grad():
        out = objective.forward(objective.compute_weights(), batch, torch.tensor([[4, 19, 24]]))
    torch.testing.assert_close(served, out[0, 1], rtol=1e-4, atol=1e-3)


def test_batched_equals_single(load: Load, dflash_dir: Path, target: Target) -> None:
    texts = {1: text(5, 1), 2: text(17, 2), 3: text(30, 3)}
    lengths = {1: 6, 2: 2, 3: 4}
    single = {}
    for key, tokens in texts.items():
        alone = load(dflash_dir)
        _start(alone, target, key, tokens)
        single[key] = _draft(alone, key, lengths[key])
    together = load(dflash_dir)
    assert isinstance(together, DFlashDrafter)
    for key, tokens in texts.items():
        _start(together, target, key, tokens)
    seen = _count_context(together)
    entries = together.draft([DraftRequest(key, lengths[key]) for key in texts])
    assert [entry.tokens for entry in entries if entry is not None] == list(single.values())
    assert [entry.start for entry in entries if entry is not None] == [5, 17, 30]
    assert seen == [[4, 16, 29]]  # one pass


@pytest.mark.parametrize("num_accepted", [0, 1, 3, 5])
@pytest.mark.parametrize("max_nodes", [0, 11])
def test_after_a_verification_equals_a_fresh_drafter(
    load: Load, dflash_dir: Path, target: Target, num_accepted: int, max_nodes: int
) -> None:
    tokens = text(11, seed=8)
    drafter = load(dflash_dir)
    assert isinstance(drafter, DFlashDrafter)
    _start(drafter, target, 1, tokens)
    drafted = list(_entry(drafter, 1, 5, max_nodes=max_nodes).tokens)
    final = next(t for t in range(3, VOCAB) if t not in drafted)
    committed = [*drafted[:num_accepted], final]
    drafter.extend(1, len(tokens), committed)
    assert drafter.draft([DraftRequest(1, 5)]) == [None]  # its features are still on the way
    whole = [*tokens, *committed]
    features = target.features(drafter, whole)
    drafter.feed(1, len(tokens) - 1, features[len(tokens) - 1 : len(whole) - 1])
    fresh = load(dflash_dir)
    _start(fresh, target, 1, whole)
    seen = _count_context(drafter)
    ours, theirs = (_entry(d, 1, 5, max_nodes=max_nodes) for d in (drafter, fresh))
    assert seen == [[num_accepted + 1]]  # the rest of the context is in the cache
    assert (ours.tokens, ours.parents) == (theirs.tokens, theirs.parents)


@pytest.mark.parametrize("order", list(itertools.permutations(["feed", "extend", "draft"])))
def test_feed_and_extend_in_any_order(
    load: Load, dflash_dir: Path, target: Target, order: tuple[str, ...]
) -> None:
    tokens = text(24, seed=12)
    drafter, fresh = load(dflash_dir), load(dflash_dir)
    features = target.features(drafter, tokens)
    drafter.open(1, tokens[:8])
    fed = 0
    for end in (12, 13, 19, 24):
        for step in order:
            if step == "feed":
                drafter.feed(1, fed, features[fed : end - 1 + (end < 24)])  # one more than the tokens allow
                fed = end - 1 + (end < 24)
            elif step == "extend":
                drafter.extend(1, min(8, end), tokens[8:end])
            else:
                drafter.draft([DraftRequest(1, 4, 9)])
    _start(fresh, target, 1, tokens)
    assert _draft(drafter, 1, 6) == _draft(fresh, 1, 6)


def test_a_longer_wish_runs_nothing_and_goes_on(drafter: DFlashDrafter, target: Target) -> None:
    _start(drafter, target, 1, text(9, seed=4))
    seen = _count_context(drafter)
    first = _draft(drafter, 1, 3)
    longer = _draft(drafter, 1, 6)
    assert longer[:3] == first
    assert _draft(drafter, 1, 2) == first[:2]
    assert _draft(drafter, 1, 10) == longer  # no more than a block has
    assert len(longer) == drafter.longest_draft
    assert seen == [[8]]


def test_a_sequence_that_is_closed_and_opened_again_starts_anew(
    drafter: DFlashDrafter, load: Load, dflash_dir: Path, target: Target
) -> None:
    _start(drafter, target, 1, text(30, seed=4))
    _draft(drafter, 1, 6)
    drafter.close(1)
    fresh = load(dflash_dir)
    for one in (drafter, fresh):
        _start(one, target, 1, text(9, seed=5))
    assert _draft(drafter, 1, 6) == _draft(fresh, 1, 6)


def test_out_of_positions_drafts_nothing(drafter: DFlashDrafter, target: Target) -> None:
    tokens = text(59, seed=6)
    _start(drafter, target, 1, tokens[:58])  # rows 57 to 63 of 64 positions
    assert len(_draft(drafter, 1, 6)) == 6
    _start(drafter, target, 2, tokens)
    assert drafter.draft([DraftRequest(2, 1)]) == [None]


def test_what_is_missing_is_named(drafter: DFlashDrafter, target: Target) -> None:
    tokens = text(12, seed=6)
    features = target.features(drafter, tokens)
    drafter.open(1, tokens)
    drafter.feed(1, 0, features[:6])
    with pytest.raises(DrafterError, match="features from 6 to 8 are missing"):
        drafter.feed(1, 9, features[9:])
    with pytest.raises(DrafterError, match="tokens 12 to 12 are missing"):
        drafter.extend(1, 13, [5])
    with pytest.raises(DrafterError, match=r"\[n, 64\]"):
        drafter.feed(1, 6, features[6:, :-1])
    with pytest.raises(DrafterError, match="not open"):
        drafter.draft([DraftRequest(2, 3)])


def test_a_pass_that_fails_takes_nothing_away(load: Load, dflash_dir: Path, target: Target) -> None:
    drafter, fresh = load(dflash_dir), load(dflash_dir)
    assert isinstance(drafter, DFlashDrafter)
    for sequence_id in (1, 2):
        _start(drafter, target, sequence_id, text(9, seed=sequence_id))
        _start(fresh, target, sequence_id, text(9, seed=sequence_id))
    _draft(drafter, 1, 2)
    forward = drafter._blocks.forward

    def failing(rows: list[BlockRows]) -> Tensor:
        forward(rows)
        raise RuntimeError("another sequence's fault")

    drafter._blocks.forward = failing  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError):
        drafter.draft([DraftRequest(1, 5), DraftRequest(2, 5)])
    drafter._blocks.forward = forward  # type: ignore[method-assign]
    for sequence_id in (1, 2):
        assert _draft(drafter, sequence_id, 5) == _draft(fresh, sequence_id, 5)


def test_outcomes_are_not_drafted_past(drafter: DFlashDrafter, target: Target) -> None:
    _start(drafter, target, 1, text(9, seed=4))
    _entry(drafter, 1, 3, max_nodes=9)
    assert drafter.draft_outcomes([OutcomeRequest(1, 3, 4, 30)]) == [None]


@pytest.mark.parametrize("max_nodes", [7, 16, 40])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=3)]
)
def test_tree_holds_the_likeliest_products(
    drafter: DFlashDrafter, target: Target, max_nodes: int, sampling: SamplingParams
) -> None:
    _start(drafter, target, 1, text(16, seed=9))
    entry = _entry(drafter, 1, 4, max_nodes=max_nodes, sampling=sampling)
    entry.check(max_tokens=max_nodes, vocab_size=VOCAB)
    assert len(entry.tokens) == max_nodes
    assert len(set(zip(entry.parents, entry.tokens, strict=True))) == max_nodes
    chain = _entry(drafter, 1, 4, sampling=sampling)
    assert chain.tokens[0] == entry.tokens[0]
    assert set(entry.tokens) <= set(DRAFT_IDS)


def test_coupled_chain_runs_the_race_in_every_row(drafter: DFlashDrafter, target: Target) -> None:
    sampling = SamplingParams(temperature=1.0, seed=11)
    _start(drafter, target, 1, text(14, seed=2))
    entry = _entry(drafter, 1, 6, sampling=sampling)
    logits = drafter._sequences[1].round.logits(0, 6)
    for depth in range(6):
        chosen, _ = choose_chain_tokens(
            logits[depth : depth + 1], torch.tensor(DRAFT_IDS), [14 + depth], [sampling]
        )
        assert entry.tokens[depth] == int(chosen)
    assert entry.tokens != tuple(DRAFT_IDS[i] for i in logits.argmax(-1).tolist())


@pytest.mark.parametrize("mode", [VerifyMode.REJECTION, VerifyMode.BLOCK])
@pytest.mark.parametrize("rule", [None, DrawRule.WITH_REPLACEMENT])
def test_draws_come_from_what_is_sent_along(
    drafter: DFlashDrafter, target: Target, mode: VerifyMode, rule: DrawRule | None
) -> None:
    """Over many seeds every row's first draw follows that row's own distribution."""
    _start(drafter, target, 1, text(14, seed=2))
    seen = torch.zeros(3, VOCAB)
    for seed in range(400):
        drafter._sequences[1].round.tokens.clear()
        drafter._sequences[1].round.draws.clear()
        sampling = SamplingParams(temperature=1.0, seed=seed, mode=mode)
        entry = _entry(drafter, 1, 3, max_nodes=6, sampling=sampling, rule=rule)
        assert entry.draft_dists is not None
        chain = [
            entry.draft_dists[i]
            for i, parent in enumerate(entry.parents)
            if i == 0 or parent != entry.parents[i - 1]
        ]
        for depth, siblings in enumerate(chain):
            assert siblings is not None
            seen[depth, siblings.tokens[0]] += 1
    expected = torch.zeros(3, VOCAB)
    expected[:, torch.tensor(DRAFT_IDS)] = drafter._sequences[1].round.logits(0, 3).softmax(-1) * 400
    for depth in range(3):
        large = expected[depth] > 8
        statistic = ((seen[depth] - expected[depth]).square() / expected[depth])[large].sum()
        assert statistic < 3 * int(large.sum()) + 12


def test_own_embedding_and_head_over_the_whole_vocabulary(
    target_dir: Path, target: Target, load: Load, tmp_path: Path
) -> None:
    shape = replace(SHAPE, draft_vocab=VOCAB)
    random = torch.Generator().manual_seed(2)
    tensors = random_tensors(shape, list(range(VOCAB)), seed=6)
    embedding, head = torch.randn(2, VOCAB, 64, generator=random)
    own = {**tensors, "embed_tokens.weight": embedding, "lm_head.weight": head}
    save(tmp_path, shape, own, model_fingerprint(target_dir), TAP_LAYERS, 64)
    config = DrafterConfig.read(tmp_path)
    save_drafter(
        tmp_path, replace(config, shape={**config.shape, "has_embedding": True, "has_head": True}), own
    )
    drafter = load(tmp_path)
    assert isinstance(drafter, DFlashDrafter)
    assert drafter._draft_ids is None
    tokens = text(10, seed=1)
    _start(drafter, target, 1, tokens)
    states = reference_states(shape, tensors, embedding, target.taps(tokens)[:-1], tokens)
    assert list(_draft(drafter, 1, 6)) == (states @ head.T).argmax(-1).tolist()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mask_token": VOCAB}, "mask_token"),
        ({"block_size": 1}, "block_size 1 leaves nothing"),
        ({"target_hidden": 32}, "must equal"),
        ({"anchor_first": 1}, "anchor_first"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(
    dflash_dir: Path,
    dflash_tensors: dict[str, Tensor],
    target_dir: Path,
    tmp_path: Path,
    change: dict[str, object],
    said: str,
) -> None:
    config = DrafterConfig.read(dflash_dir)
    save_drafter(tmp_path, replace(config, shape={**config.shape, **change}), dflash_tensors)
    with pytest.raises(CheckpointError, match=said):
        load_drafter(tmp_path, target_dir)


def test_damaged_tensors_are_refused_by_name(
    dflash_dir: Path, dflash_tensors: dict[str, Tensor], target_dir: Path, tmp_path: Path
) -> None:
    broken = {k: v for k, v in dflash_tensors.items() if k != "hidden_norm.weight"}
    broken["layers.1.mlp.up_proj.weight"] = broken["layers.1.mlp.up_proj.weight"][:, :-1]
    save_drafter(tmp_path, DrafterConfig.read(dflash_dir), broken)
    with pytest.raises(
        CheckpointError, match=r"hidden_norm\.weight is missing.*layers\.1\.mlp\.up_proj\.weight has shape"
    ):
        load_drafter(tmp_path, target_dir)


def test_features_take_the_sheets_bytes(drafter: DFlashDrafter) -> None:
    """One fused feature of the target's width for every committed token, not its streams."""
    assert drafter.tap is not None
    assert drafter.tap.width(SHAPE.target_hidden) == SHAPE.hidden
    assert drafter.tap.num_sources == 3


def test_shapes_count_as_the_public_checkpoint() -> None:
    """Five layers have 58 tensors, embedding and head not among them."""
    assert len(replace(SHAPE, num_layers=5).parameter_shapes()) == 58
