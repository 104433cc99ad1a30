"""Medusa serving: equal to the heads' definition and to training, alone or together, whatever comes in which order."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.drafts import DraftEntry
from paceline.methods.checkpoint import CheckpointError, DrafterConfig, save_drafter
from paceline.methods.drafter import Drafter, DrafterError, DraftRequest, OutcomeRequest
from paceline.methods.medusa1.drafter import Medusa1Drafter
from paceline.methods.medusa2.drafter import Medusa2Drafter
from paceline.methods.medusa_heads.heads import MedusaShape, OutputHead
from paceline.methods.medusa_heads.training import HeadStack
from paceline.methods.static_tree import search_tree
from paceline.sampling.params import SamplingParams
from tests.methods.conftest import DRAFT_IDS, MEDUSA, VOCAB, Target, medusa_tensors, save_medusa, text

Load = Callable[[Path], Drafter]

SHAPES = {
    "own": MEDUSA,
    "whole": replace(MEDUSA, draft_vocab=VOCAB, num_heads=3),
    "two layers": replace(MEDUSA, num_layers=2, num_heads=2),
    "no bias": replace(MEDUSA, has_bias=False),
    "shared": replace(MEDUSA, output=OutputHead.SHARED),
    "target": replace(MEDUSA, output=OutputHead.TARGET),
    "whole target": replace(MEDUSA, draft_vocab=VOCAB, output=OutputHead.TARGET),
}


@pytest.fixture
def drafter(load: Load, medusa1_dir: Path) -> Drafter:
    return load(medusa1_dir)


def _start(drafter: Drafter, target: Target, sequence_id: int, tokens: list[int]) -> None:
    drafter.open(sequence_id, tokens)
    drafter.feed(sequence_id, 0, target.features(drafter, tokens)[:-1])


def _draft(
    drafter: Drafter, sequence_id: int, num_tokens: int, nodes: int = 0, **sampling: object
) -> DraftEntry:
    params = SamplingParams(**{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
    (entry,) = drafter.draft([DraftRequest(sequence_id, num_tokens, nodes, params)])
    assert entry is not None
    entry.check(max(nodes, num_tokens), VOCAB)
    return entry


def _reference(shape: MedusaShape, w: dict[str, Tensor], head: Tensor, hidden: Tensor) -> Tensor:
    """Logits `[num_heads, target_vocab]` by definition, -inf where a token cannot be drafted."""
    ids = w.get("token_map", torch.arange(VOCAB))
    rows = []
    for k in range(shape.num_heads):
        z = hidden
        for j in range(shape.num_layers):
            z = z + F.silu(w[f"blocks.{k}.layers.{j}.weight"] @ z + w.get(f"blocks.{k}.layers.{j}.bias", 0.0))
        out = {"own": w.get(f"lm_heads.{k}.weight"), "shared": w.get("lm_head.weight"), "target": head[ids]}
        weight = out[shape.output]
        assert weight is not None
        rows.append(torch.full((VOCAB,), -torch.inf).index_copy(0, ids, weight @ z))
    return torch.stack(rows)


@pytest.mark.parametrize("name", list(SHAPES))
def test_a_chain_is_each_heads_likeliest_token(
    name: str, load: Load, target_dir: Path, target: Target, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    shape = SHAPES[name]
    tensors = medusa_tensors(shape)
    drafter = load(save_medusa(tmp_path, target_dir, shape, tensors))
    head = load_file(target_dir / "model.safetensors")["model.embed_tokens.weight"]
    drafted = set()
    for seed in range(4):
        tokens = text(9 + seed, seed)
        _start(drafter, target, seed, tokens)
        logits = _reference(shape, tensors, head, target.features(drafter, tokens)[-2])
        entry = _draft(drafter, seed, 8)
        assert entry.tokens == tuple(logits.argmax(-1).tolist())
        assert len(entry.tokens) == shape.num_heads  # however long a draft was asked for
        log_probs = logits.log_softmax(-1).max(-1).values
        assert torch.allclose(torch.tensor(entry.log_probs), log_probs, atol=1e-4)
        drafted.add(entry.tokens)
    assert len(drafted) == 4


def test_serving_equals_training(drafter: Drafter, target: Target) -> None:
    """Head k at row r proposes token r + 2 + k in training; of n tokens the drafter reads row n - 2."""
    tensors = medusa_tensors(MEDUSA)
    ids = tensors.pop("token_map")
    stack = HeadStack(MEDUSA, tensors, torch.zeros(VOCAB, 64), ids, torch.float32)
    tokens = text(20, seed=3)
    _start(drafter, target, 1, tokens)
    row = target.features(drafter, tokens)[len(tokens) - 2 : len(tokens) - 1]
    assert _draft(drafter, 1, 5).tokens == tuple(int(stack.best(row, k)[0, 0]) for k in range(5))
    assert _draft(drafter, 1, 5).start == len(tokens)


@pytest.mark.parametrize("nodes", [0, 14])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_batched_equals_single(
    load: Load, medusa1_dir: Path, target: Target, nodes: int, temperature: float
) -> None:
    texts = {1: text(5, 1), 2: text(17, 2), 3: text(30, 3)}
    requests = [
        DraftRequest(key, length, nodes, SamplingParams(temperature=temperature, seed=key))
        for key, length in ((1, 5), (2, 2), (3, 4))
    ]
    single = []
    for request in requests:
        alone = load(medusa1_dir)
        _start(alone, target, request.sequence_id, texts[request.sequence_id])
        single += alone.draft([request])
    together = load(medusa1_dir)
    for key, tokens in texts.items():
        _start(together, target, key, tokens)
    entries = together.draft(requests)
    assert [e and (e.start, e.tokens, e.parents) for e in entries] == [
        e and (e.start, e.tokens, e.parents) for e in single
    ]
    assert all(entry is not None for entry in entries)


@pytest.mark.parametrize("name", ["own", "target", "two layers"])
def test_only_as_many_heads_are_run_as_a_draft_is_deep(
    name: str, load: Load, target_dir: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A longer wish runs the rest, whoever else is drafted for, and drafts as if all had been run at once."""
    shape = replace(SHAPES[name], num_heads=5)
    path = save_medusa(tmp_path, target_dir, shape, medusa_tensors(shape))
    drafter, fresh = load(path), load(path)
    assert isinstance(drafter, Medusa1Drafter)
    for sequence_id in (1, 2):
        for one in (drafter, fresh):
            _start(one, target, sequence_id, text(9 + sequence_id, sequence_id))
    expected = {key: _draft(fresh, key, 5).tokens for key in (1, 2)}
    passes: list[tuple[int, range]] = []
    forward = drafter._heads.forward

    def counting(hidden: Tensor, heads: range) -> Tensor:
        passes.append((len(hidden), heads))
        return forward(hidden, heads)

    monkeypatch.setattr(drafter._heads, "forward", counting)
    assert _draft(drafter, 1, 2).tokens == expected[1][:2]
    both = drafter.draft([DraftRequest(1, 4), DraftRequest(2, 3)])
    assert [entry and entry.tokens for entry in both] == [expected[1][:4], expected[2][:3]]
    assert _draft(drafter, 2, 4).tokens == expected[2][:4]  # was run beside the other's
    assert _draft(drafter, 2, 7).tokens == expected[2]
    assert passes == [(1, range(2)), (2, range(4)), (1, range(4, 5))]


def test_any_order_of_tokens_and_features_gives_the_same_draft(
    load: Load, medusa1_dir: Path, target: Target
) -> None:
    """Two rounds came in: in order, features first, tokens first, older features after newer ones, or twice."""
    tokens, first, second = text(9, 4), [5, 6, 7], [8]
    whole = tokens + first + second
    fresh = load(medusa1_dir)
    _start(fresh, target, 1, whole)
    expected = _draft(fresh, 1, 5).tokens
    rows = target.features(fresh, whole)
    news: list[Callable[[Drafter], None]] = [
        lambda d: d.extend(1, 9, first),
        lambda d: d.extend(1, 12, second),
        lambda d: d.feed(1, 10, rows[10:11]),
        lambda d: d.feed(1, 11, rows[11:12]),
    ]
    for order in itertools.permutations(range(4)):
        if order.index(0) > order.index(1):
            continue  # tokens come in order
        drafter = load(medusa1_dir)
        drafter.open(1, tokens)
        drafter.feed(1, 7, rows[7:8])
        for which in order:
            news[which](drafter)
            drafter.draft([DraftRequest(1, 3)])  # whether or not it can: nothing may stay behind
        news[order[-1]](drafter)
        assert _draft(drafter, 1, 5).tokens == expected


def test_it_drafts_only_from_the_features_before_the_root(drafter: Drafter, target: Target) -> None:
    tokens = text(12, seed=6)
    features = target.features(drafter, tokens)
    drafter.open(1, tokens)
    assert drafter.draft([DraftRequest(1, 3)]) == [None]
    drafter.feed(1, 9, features[9:10])
    assert drafter.draft([DraftRequest(1, 3)]) == [None]  # the target has stepped on since
    drafter.feed(1, 11, features[11:12])
    assert drafter.draft([DraftRequest(1, 3)]) == [None]  # of a text that is not known here yet
    drafter.extend(1, 12, [5])
    assert _draft(drafter, 1, 3).start == 13
    with pytest.raises(DrafterError, match="missing"):
        drafter.extend(1, 15, [5])
    with pytest.raises(DrafterError, match="features must be"):
        drafter.feed(1, 12, features[:1, :-1])


def test_a_draft_has_a_token_for_each_head_at_most(drafter: Drafter, target: Target) -> None:
    _start(drafter, target, 1, text(9, seed=4))
    assert len(_draft(drafter, 1, 10).tokens) == drafter.longest_draft == 5


def test_out_of_positions_drafts_nothing(drafter: Drafter, target: Target) -> None:
    tokens = text(62, seed=6)
    _start(drafter, target, 1, tokens)
    assert drafter.draft([DraftRequest(1, 3)]) == [None]
    assert len(_draft(drafter, 1, 2).tokens) == 2


def test_a_tree_combines_ranks_in_the_static_shape(
    load: Load, target_dir: Path, target: Target, tmp_path: Path
) -> None:
    accuracies = [[0.5, 0.2, 0.1], [0.4, 0.1, 0.1], [0.3, 0.1, 0.05], [0.3, 0.1], [0.2]]
    tensors = medusa_tensors(MEDUSA)
    drafter = load(save_medusa(tmp_path, target_dir, MEDUSA, tensors, accuracies=accuracies))
    tokens = text(16, seed=9)
    _start(drafter, target, 1, tokens)
    entry = _draft(drafter, 1, 4, 12)
    tree = search_tree(accuracies, 12, 4)
    assert entry.parents == tree.parents
    logits = _reference(MEDUSA, tensors, torch.zeros(VOCAB, 64), target.features(drafter, tokens)[-2])
    log_probs, ids = logits.log_softmax(-1).topk(3)
    for node, (head, rank) in enumerate(zip(tree.heads, tree.ranks, strict=True)):
        assert entry.tokens[node] == int(ids[head, rank])
        assert entry.log_probs[node] == pytest.approx(float(log_probs[head, rank]), abs=1e-4)
    assert _draft(drafter, 1, 4).tokens == tuple(ids[:4, 0].tolist())
    # A longer wish than there are heads still spends its nodes on branches.
    deep = _draft(drafter, 1, 9, 12)
    assert (deep.start, len(deep.tokens)) == (16, 12)


def test_filters_that_leave_few_tokens_leave_a_smaller_tree(drafter: Drafter, target: Target) -> None:
    tokens = text(16, seed=9)
    _start(drafter, target, 1, tokens)
    entry = _draft(drafter, 1, 3, 14, temperature=1.0, top_k=2, seed=3)
    siblings = list(zip(entry.parents, entry.tokens, strict=True))
    assert len(set(siblings)) == len(siblings)
    assert all(entry.parents.count(parent) <= 2 for parent in set(entry.parents))
    assert 3 < len(entry.tokens) <= 14


def test_coupled_drafts_follow_the_seed_and_stay_in_the_draft_vocabulary(
    drafter: Drafter, target: Target
) -> None:
    for sequence_id in (1, 2, 3):
        _start(drafter, target, sequence_id, text(14, seed=2))
    first, again, other = (
        _draft(drafter, sequence_id, 5, temperature=1.0, seed=seed).tokens
        for sequence_id, seed in ((1, 11), (2, 11), (3, 12))
    )
    assert first == again != other
    assert set(first) <= set(DRAFT_IDS)
    tree = _draft(drafter, 1, 5, 12, temperature=1.0, seed=11)
    best = max((i for i, parent in enumerate(tree.parents) if parent < 0), key=lambda i: tree.log_probs[i])
    assert tree.tokens[best] == first[0]


def test_nothing_is_known_of_outcomes(drafter: Drafter, target: Target) -> None:
    _start(drafter, target, 1, text(9, 1))
    _draft(drafter, 1, 3, 6)
    assert drafter.draft_outcomes([OutcomeRequest(1, 2, 4, 16)]) == [None]


def test_damaged_checkpoints_are_refused_by_name(load: Load, target_dir: Path, tmp_path: Path) -> None:
    tensors = medusa_tensors(MEDUSA)
    broken: dict[str, tuple[dict[str, Tensor], dict[str, object]]] = {
        r"blocks\.1\.layers\.0\.bias is missing": (
            {k: v for k, v in tensors.items() if k != "blocks.1.layers.0.bias"},
            {},
        ),
        r"lm_heads\.5\.weight is surplus": ({**tensors, "lm_heads.5.weight": torch.zeros(2, 2)}, {}),
        "token_map does not name": ({**tensors, "token_map": tensors["token_map"] + VOCAB}, {}),
        "must be at most 16": (tensors, {"num_heads": 17}),
        "shape.output": (tensors, {"output": "other"}),
        "shape.draft_vocab must not": (tensors, {"draft_vocab": VOCAB + 1}),
        "shape.accuracies": (tensors, {"accuracies": [[0.5]]}),
        "probabilities": (tensors, {"accuracies": [[1.5]] * 5}),
        "LM head is": ({}, {"output": "target", "target_vocab": VOCAB + 1, "num_heads": 1}),
    }
    for number, (message, (content, changes)) in enumerate(broken.items()):
        if changes.get("output") == "target":
            names = ("blocks.0.layers.0.weight", "blocks.0.layers.0.bias", "token_map")
            content = {name: tensors[name] for name in names}
        path = save_medusa(tmp_path / str(number), target_dir, MEDUSA, content, **changes)
        with pytest.raises(CheckpointError, match=message):
            load(path)


def test_medusa2_is_served_alike_and_bound_to_its_own_target(
    load: Load, medusa1_dir: Path, target: Target, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    config = DrafterConfig.read(medusa1_dir)
    tensors = load_file(medusa1_dir / "model.safetensors")
    save_drafter(tmp_path, replace(config, method="medusa2"), tensors)
    first, second = load(medusa1_dir), load(tmp_path)
    assert isinstance(first, Medusa1Drafter)
    assert isinstance(second, Medusa2Drafter)
    for drafter in (first, second):
        _start(drafter, target, 1, text(9, 1))
    assert _draft(first, 1, 5) == _draft(second, 1, 5)
    save_drafter(tmp_path, replace(config, method="medusa2", target_fingerprint="0" * 64), tensors)
    with pytest.raises(CheckpointError, match="was made for target"):
        load(tmp_path)
