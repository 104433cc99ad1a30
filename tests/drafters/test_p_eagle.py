"""P-EAGLE serving: equal to a slow reference and to its training objective, through rejections, batches and wishes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.drafters import (
    CheckpointError,
    Drafter,
    DrafterError,
    DraftRequest,
    OutcomeRequest,
    load_drafter,
)
from paceline.drafters.checkpoint import DrafterConfig, save_drafter
from paceline.drafters.draft_layer import LayerOutput
from paceline.drafters.marginal_tree import marginal_tree
from paceline.drafters.p_eagle import PEagleDrafter
from paceline.models import model_fingerprint
from paceline.sampling import SamplingParams, VerifyMode
from paceline.training.data import Batch
from paceline.training.eagle3 import TargetFacts
from paceline.training.p_eagle import PEagleObjective, PEagleShape
from paceline.training.p_eagle_rows import FlatRows, all_rows
from paceline.trie import DraftEntry, DrawRule
from tests.drafters.conftest import DRAFT_IDS, TAP_LAYERS, VOCAB, Target, text
from tests.drafters.conftest import P_EAGLE_SHAPE as SHAPE
from tests.drafters.p_eagle_checkpoint import random_tensors, reference_logits, save

Load = Callable[[Path], Drafter]


@pytest.fixture(scope="module")
def tensors(p_eagle_tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return p_eagle_tensors


@pytest.fixture(scope="module")
def checkpoint(p_eagle_dir: Path) -> Path:
    return p_eagle_dir


@pytest.fixture
def drafter(load: Load, checkpoint: Path) -> PEagleDrafter:
    drafter = load(checkpoint)
    assert isinstance(drafter, PEagleDrafter)
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


def _count_rows(drafter: PEagleDrafter) -> list[int]:
    rows: list[int] = []
    forward = drafter._layer.forward

    def counting(parts: object, wanted: object) -> LayerOutput:
        output = forward(parts, wanted)  # type: ignore[arg-type]
        rows.append(output.states.shape[0])
        return output

    drafter._layer.forward = counting  # type: ignore[method-assign]
    return rows


@pytest.mark.parametrize("length", [2, 9, 33])
def test_chain_equals_reference(
    drafter: PEagleDrafter, target: Target, tensors: dict[str, Tensor], length: int
) -> None:
    tokens = text(length, seed=length)
    _start(drafter, target, 7, tokens)
    entry = _entry(drafter, 7, 6)
    logits = reference_logits(SHAPE, tensors, target.taps(tokens)[:-1], tokens, 6)
    assert list(entry.tokens) == [DRAFT_IDS[i] for i in logits.argmax(-1).tolist()]
    expected = logits.log_softmax(-1).max(-1).values
    torch.testing.assert_close(torch.tensor(entry.log_probs), expected, rtol=1e-3, atol=1e-3)
    assert len(set(entry.tokens)) > 2


def test_serving_equals_the_training_mask_of_the_last_anchor(
    drafter: PEagleDrafter, target: Target, tensors: dict[str, Tensor]
) -> None:
    tokens = text(20, seed=3)
    _start(drafter, target, 1, tokens)
    _draft(drafter, 1, 6)
    served = drafter._sequences[1].round.logits(0, 6)
    # What stands behind the root is unknown to serving, and must not matter to training's rows of that anchor.
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
    objective = PEagleObjective(
        SHAPE,
        {k: tensors[k] for k in SHAPE.parameter_shapes()},
        torch.zeros(VOCAB, 64),
        torch.tensor(DRAFT_IDS),
        torch.ones(3 * 64),
        TargetFacts("", "tiny", tuple(TAP_LAYERS), 64),
        dtype=torch.float32,
    )
    rows = all_rows(whole.shape[1], SHAPE.num_depths)
    flat = FlatRows.pad([rows], [torch.ones(rows.shape[1], dtype=torch.bool)])
    with torch.no_grad():
        out = objective.forward(objective.compute_weights(), batch, flat)[0]
    trained = out[rows[0] == len(tokens) - 2] @ tensors["lm_head.weight"].T
    torch.testing.assert_close(served, trained, rtol=1e-4, atol=1e-3)


def test_batched_equals_single(load: Load, checkpoint: Path, target: Target) -> None:
    texts = {1: text(5, 1), 2: text(17, 2), 3: text(30, 3)}
    lengths = {1: 6, 2: 2, 3: 4}
    single = {}
    for key, tokens in texts.items():
        alone = load(checkpoint)
        _start(alone, target, key, tokens)
        single[key] = _draft(alone, key, lengths[key])
    together = load(checkpoint)
    assert isinstance(together, PEagleDrafter)
    for key, tokens in texts.items():
        _start(together, target, key, tokens)
    rows = _count_rows(together)
    entries = together.draft([DraftRequest(key, lengths[key]) for key in texts])
    assert [entry.tokens for entry in entries if entry is not None] == list(single.values())
    assert [entry.start for entry in entries if entry is not None] == [5, 17, 30]
    assert rows == [
        4 + 5 + 16 + 1 + 29 + 3
    ]  # one pass: true rows, and a mask row for each token but the first


@pytest.mark.parametrize("num_accepted", [0, 1, 3, 5])
@pytest.mark.parametrize("max_nodes", [0, 11])
def test_after_a_verification_equals_a_fresh_drafter(
    load: Load, checkpoint: Path, target: Target, num_accepted: int, max_nodes: int
) -> None:
    tokens = text(11, seed=8)
    drafter = load(checkpoint)
    _start(drafter, target, 1, tokens)
    drafted = list(_entry(drafter, 1, 5, max_nodes=max_nodes).tokens)
    final = next(t for t in range(3, VOCAB) if t not in drafted)
    committed = [*drafted[:num_accepted], final]
    drafter.extend(1, len(tokens), committed)
    assert drafter.draft([DraftRequest(1, 5)]) == [None]  # its features are still on the way
    whole = [*tokens, *committed]
    features = target.features(drafter, whole)
    drafter.feed(1, len(tokens) - 1, features[len(tokens) - 1 : len(whole) - 1])
    fresh = load(checkpoint)
    _start(fresh, target, 1, whole)
    ours, theirs = (_entry(d, 1, 5, max_nodes=max_nodes) for d in (drafter, fresh))
    assert ours.tokens == theirs.tokens
    assert ours.parents == theirs.parents


@pytest.mark.parametrize("order", list(itertools.permutations(["feed", "extend", "draft"])))
def test_feed_and_extend_in_any_order(
    load: Load, checkpoint: Path, target: Target, order: tuple[str, ...]
) -> None:
    tokens = text(24, seed=12)
    drafter, fresh = load(checkpoint), load(checkpoint)
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


def test_a_longer_wish_runs_only_new_mask_rows(load: Load, checkpoint: Path, target: Target) -> None:
    tokens = text(9, seed=4)
    drafter, fresh = load(checkpoint), load(checkpoint)
    assert isinstance(drafter, PEagleDrafter)
    _start(drafter, target, 1, tokens)
    _start(fresh, target, 1, tokens)
    rows = _count_rows(drafter)
    first = _draft(drafter, 1, 3)
    longer = _draft(drafter, 1, 6)
    assert longer == _draft(fresh, 1, 6)
    assert longer[:3] == first
    assert _draft(drafter, 1, 2) == first[:2]
    assert rows == [8 + 2, 3]


def test_no_more_tokens_than_it_was_trained_for(drafter: PEagleDrafter, target: Target) -> None:
    _start(drafter, target, 1, text(9, seed=4))
    assert len(_draft(drafter, 1, 10)) == drafter.longest_draft == 6
    assert _draft(drafter, 1, 10) == _draft(drafter, 1, 6)
    entry = _entry(drafter, 1, 10, max_nodes=10)
    assert len(entry.tokens) == 10  # the wish was for as many nodes
    depths = [0] * len(entry.tokens)
    for i, parent in enumerate(entry.parents):
        depths[i] = 1 if parent < 0 else depths[parent] + 1
    assert max(depths) <= 6


def test_out_of_positions_drafts_nothing(drafter: PEagleDrafter, target: Target) -> None:
    _start(drafter, target, 1, text(62, seed=6))
    assert drafter.draft([DraftRequest(1, 3)]) == [None]
    assert len(_draft(drafter, 1, 2)) == 2


def test_what_is_missing_is_named(drafter: PEagleDrafter, target: Target) -> None:
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


def test_a_pass_that_fails_takes_nothing_away(load: Load, checkpoint: Path, target: Target) -> None:
    drafter, fresh = load(checkpoint), load(checkpoint)
    assert isinstance(drafter, PEagleDrafter)
    for sequence_id in (1, 2):
        _start(drafter, target, sequence_id, text(9, seed=sequence_id))
        _start(fresh, target, sequence_id, text(9, seed=sequence_id))
    _draft(drafter, 1, 2)
    forward = drafter._layer.forward

    def failing(parts: object, wanted: object) -> LayerOutput:
        forward(parts, wanted)  # type: ignore[arg-type]
        raise RuntimeError("another sequence's fault")

    drafter._layer.forward = failing  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        drafter.draft([DraftRequest(1, 5), DraftRequest(2, 5)])
    drafter._layer.forward = forward  # type: ignore[method-assign]
    for sequence_id in (1, 2):
        assert _draft(drafter, sequence_id, 5) == _draft(fresh, sequence_id, 5)


def test_outcomes_are_not_drafted_past(drafter: PEagleDrafter, target: Target) -> None:
    _start(drafter, target, 1, text(9, seed=4))
    _entry(drafter, 1, 3, max_nodes=9)
    assert drafter.draft_outcomes([OutcomeRequest(1, 3, 4, 30)]) == [None]


@pytest.mark.parametrize("max_nodes", [7, 16, 40])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=3)]
)
def test_tree_holds_the_likeliest_products(
    drafter: PEagleDrafter, target: Target, max_nodes: int, sampling: SamplingParams
) -> None:
    _start(drafter, target, 1, text(16, seed=9))
    entry = _entry(drafter, 1, 4, max_nodes=max_nodes, sampling=sampling)
    entry.check(max_tokens=max_nodes, vocab_size=VOCAB)
    assert len(entry.tokens) == max_nodes
    assert len(set(zip(entry.parents, entry.tokens, strict=True))) == max_nodes
    chain = _entry(drafter, 1, 4, sampling=sampling)
    assert chain.tokens[0] == entry.tokens[0]
    assert set(entry.tokens) <= set(DRAFT_IDS)


def test_marginal_tree_equals_all_products_sorted() -> None:
    random = torch.Generator().manual_seed(1)
    log_probs = torch.randn(4, 5, generator=random).log_softmax(-1).sort(dim=-1, descending=True).values
    tokens = torch.randperm(20, generator=random).view(4, 5).tolist()
    entry = marginal_tree(9, log_probs.tolist(), tokens, 30)
    paths = []
    for depth in range(1, 5):
        for ranks in itertools.product(range(5), repeat=depth):
            score = sum(float(log_probs[d, r]) for d, r in enumerate(ranks))
            paths.append((-score, tuple(tokens[d][r] for d, r in enumerate(ranks))))
    best = [path for _, path in sorted(paths)[:30]]
    ours: list[tuple[int, ...]] = []
    for token, parent in zip(entry.tokens, entry.parents, strict=True):
        ours.append((*(ours[parent] if parent >= 0 else ()), token))
    assert ours == best
    assert entry.start == 9
    small = marginal_tree(1, [[-0.1], [-0.2]], [[3], [4]], 10)
    assert (small.tokens, small.parents) == ((3, 4), (-1, 0))


def test_coupled_chain_runs_the_race_at_every_depth(drafter: PEagleDrafter, target: Target) -> None:
    from paceline.drafters.choice import choose_chain_tokens

    tokens, sampling = text(14, seed=2), SamplingParams(temperature=1.0, seed=11)
    _start(drafter, target, 1, tokens)
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
    drafter: PEagleDrafter, target: Target, mode: VerifyMode, rule: DrawRule | None
) -> None:
    """Over many seeds every depth's first draw follows that depth's own distribution."""
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
    probs = drafter._sequences[1].round.logits(0, 3).softmax(-1)
    expected = torch.zeros(3, VOCAB)
    expected[:, torch.tensor(DRAFT_IDS)] = probs * 400
    for depth in range(3):
        large = expected[depth] > 8
        statistic = ((seen[depth] - expected[depth]).square() / expected[depth])[large].sum()
        assert statistic < 3 * int(large.sum()) + 12


def test_full_vocabulary_needs_no_map(target_dir: Path, target: Target, load: Load, tmp_path: Path) -> None:
    shape = PEagleShape(
        **{f: getattr(SHAPE, f) for f in PEagleShape.__dataclass_fields__ if f != "draft_vocab"},
        draft_vocab=VOCAB,
    )
    tensors = random_tensors(shape, list(range(VOCAB)), seed=6)
    save(tmp_path, shape, tensors, model_fingerprint(target_dir), TAP_LAYERS, max_positions=64)
    drafter = load(tmp_path)
    assert isinstance(drafter, PEagleDrafter)
    assert drafter._draft_ids is None
    tokens = text(10, seed=1)
    _start(drafter, target, 1, tokens)
    logits = reference_logits(shape, tensors, target.taps(tokens)[:-1], tokens, 6)
    assert list(_draft(drafter, 1, 6)) == logits.argmax(-1).tolist()


def test_damaged_checkpoints_are_refused_by_name(
    checkpoint: Path, tensors: dict[str, Tensor], target_dir: Path, tmp_path: Path
) -> None:
    config = DrafterConfig.read(checkpoint)
    broken = {k: v for k, v in tensors.items() if k != "mask_hidden"}
    broken["layers.1.mlp.up_proj.weight"] = broken["layers.1.mlp.up_proj.weight"][:, :-1]
    save_drafter(tmp_path, config, broken)
    with pytest.raises(
        CheckpointError, match=r"mask_hidden is missing.*layers\.1\.mlp\.up_proj\.weight has shape"
    ):
        load_drafter(tmp_path, target_dir)
    shape = {**config.shape, "mask_token": VOCAB}
    save_drafter(tmp_path, DrafterConfig("p_eagle", config.target_fingerprint, "tiny", shape), tensors)
    with pytest.raises(CheckpointError, match="mask_token"):
        load_drafter(tmp_path, target_dir)


def test_features_take_the_sheets_bytes(drafter: PEagleDrafter) -> None:
    """One fused feature of the drafter's width for every committed token, not three streams."""
    assert drafter.tap is not None
    assert drafter.tap.width(SHAPE.target_hidden) == SHAPE.hidden
    assert drafter.tap.num_sources == 3
