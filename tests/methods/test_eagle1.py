"""EAGLE-1 and EAGLE-2 serving: equal to a slow reference and to the training objective; static and dynamic trees."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.drafts import DraftEntry
from paceline.methods.autoregressive.static_rule import StaticRule, expected_tokens, reference_paths
from paceline.methods.autoregressive.tree_rule import DynamicRule
from paceline.methods.checkpoint import CheckpointError, save_drafter
from paceline.methods.drafter import Drafter, DraftRequest
from paceline.methods.eagle.feature_objective import Eagle1Objective
from paceline.methods.eagle1.drafter import Eagle1Drafter
from paceline.methods.eagle2.drafter import Eagle2Drafter
from paceline.methods.loading import drafter_tap, load_drafter
from paceline.sampling.params import SamplingParams
from paceline.training.data import Batch
from paceline.training.objective import TargetReference
from tests.methods.conftest import EAGLE1_SHAPE, VOCAB, Target, eagle1_config, text
from tests.methods.eagle_reference import ReferenceEagle1, chain_logits

Load = Callable[[Path], Drafter]


def embedding_of(target_dir: Path) -> Tensor:
    return load_file(target_dir / "model.safetensors")["model.embed_tokens.weight"]


def final_norms(target_dir: Path, tokens: Sequence[int]) -> Tensor:
    """The target's final-norm output at every position, `[n, hidden]`, by transformers."""
    model = LlamaForCausalLM.from_pretrained(target_dir, dtype=torch.float32)
    with torch.inference_mode():
        return model.model(torch.tensor([list(tokens)])).last_hidden_state[0].clone()


@pytest.fixture(scope="session")
def reference(target_dir: Path, eagle1_tensors: dict[str, Tensor]) -> ReferenceEagle1:
    shape = EAGLE1_SHAPE
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
    )
    model = ReferenceEagle1(config)
    model.load_state_dict({**eagle1_tensors, "embed_tokens.weight": embedding_of(target_dir)})
    return model


def likeliest(
    model: ReferenceEagle1, target_dir: Path, tokens: list[int], forced: list[int], steps: int
) -> list[int]:
    """The greedy chain behind some forced tokens."""
    embedding, features = embedding_of(target_dir), final_norms(target_dir, tokens)[:-1]
    chain = list(forced)
    for _ in range(steps):
        logits = chain_logits(model, lambda x: embedding @ x, features, tokens, chain)  # type: ignore[arg-type]
        chain.append(int(logits[-1].argmax()))
    return chain[len(forced) :]


def _start(drafter: Drafter, target: Target, sequence_id: int, tokens: list[int]) -> None:
    drafter.open(sequence_id, tokens)
    drafter.feed(sequence_id, 0, target.features(drafter, tokens)[:-1])


def _draft(drafter: Drafter, num_tokens: int, max_nodes: int = 0, **fields: object) -> DraftEntry:
    (entry,) = drafter.draft([DraftRequest(1, num_tokens, max_nodes, **fields)])  # type: ignore[arg-type]
    assert entry is not None
    entry.check(max(num_tokens, max_nodes), VOCAB)
    return entry


def test_it_reads_the_final_norm_and_nothing_else(
    load: Load, eagle1_dir: Path, target_dir: Path, target: Target
) -> None:
    drafter, tap = load(eagle1_dir), drafter_tap(eagle1_dir)
    assert tap is not None
    assert (tap.layers, tap.norm_final, tap.projection) == ((), True, None)
    tokens = text(12, seed=2)
    torch.testing.assert_close(
        target.features(drafter, tokens), final_norms(target_dir, tokens), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("length", [2, 9, 33])
def test_chain_equals_reference(
    load: Load, eagle1_dir: Path, target: Target, target_dir: Path, reference: ReferenceEagle1, length: int
) -> None:
    tokens, drafter = text(length, seed=length), load(eagle1_dir)
    _start(drafter, target, 1, tokens)
    entry = _draft(drafter, 6)
    assert list(entry.tokens) == likeliest(reference, target_dir, tokens, [], 6)
    assert len(set(entry.tokens)) > 1
    embedding, features = embedding_of(target_dir), final_norms(target_dir, tokens)[:-1]
    logits = chain_logits(reference, lambda x: embedding @ x, features, tokens, entry.tokens[:-1])  # type: ignore[arg-type]
    expected = logits.log_softmax(-1)[range(6), list(entry.tokens)]
    torch.testing.assert_close(torch.tensor(entry.log_probs), expected, rtol=1e-4, atol=1e-4)


def test_serving_equals_training(
    load: Load, eagle1_dir: Path, target: Target, target_dir: Path, eagle1_tensors: dict[str, Tensor]
) -> None:
    tokens, drafter = text(20, seed=3), load(eagle1_dir)
    _start(drafter, target, 1, tokens)
    drafted = _draft(drafter, 4).tokens
    embedding = embedding_of(target_dir)
    facts = TargetReference("", "tiny", (), 64)
    objective = Eagle1Objective(
        EAGLE1_SHAPE, eagle1_tensors, embedding, embedding, facts, dtype=torch.float32
    )
    whole = torch.tensor([[*tokens, *drafted]])
    features = final_norms(target_dir, whole[0].tolist())[None]
    batch = Batch(
        tokens=whole,
        top_tokens=torch.zeros_like(whole),
        is_answer=torch.ones_like(whole, dtype=torch.bool),
        is_greedy=torch.ones(1, dtype=torch.bool),
        lengths=torch.tensor([whole.shape[1]]),
        taps=None,
        hidden=features,
    )
    # The last row of true features is the one before the root; step j of the test stands j drafted tokens later.
    row = len(tokens) - 2
    with torch.no_grad():
        weights = {k: p.detach() for k, p in objective.named_parameters().items()}
        steps = [out[0, row] for out in objective.unroll(weights, batch, features, 4)]
    assert [int((embedding @ out).argmax()) for out in steps] == list(drafted)


def test_coupled_drafts_repeat_and_differ_from_greedy_ones(
    load: Load, eagle1_dir: Path, target: Target
) -> None:
    tokens, sampling = text(14, seed=2), SamplingParams(temperature=1.0, seed=11)
    drafted = []
    for params in (sampling, sampling, SamplingParams(temperature=0.0)):
        drafter = load(eagle1_dir)
        _start(drafter, target, 1, tokens)
        drafted.append((_draft(drafter, 8, sampling=params), _draft(drafter, 4, 12, sampling=params)))
    assert drafted[0] == drafted[1]
    assert drafted[0][0].tokens != drafted[2][0].tokens
    assert drafted[0][1].tokens != drafted[2][1].tokens


def _rank_paths(
    reference: ReferenceEagle1, target_dir: Path, tokens: list[int], entry: DraftEntry
) -> list[tuple[int, ...]]:
    """Each node as its path of ranks under the reference's logits."""  # fmt: skip
    embedding, features = embedding_of(target_dir), final_norms(target_dir, tokens)[:-1]
    words: list[tuple[int, ...]] = []
    ranks: list[tuple[int, ...]] = []
    for token, parent in zip(entry.tokens, entry.parents, strict=True):
        before = words[parent] if parent >= 0 else ()
        logits = chain_logits(reference, lambda x: embedding @ x, features, tokens, before)[-1]  # type: ignore[arg-type]
        rank = int((logits > logits[token]).sum())
        words.append((*before, token))
        ranks.append((*(ranks[parent] if parent >= 0 else ()), rank))
    return ranks


def test_the_static_tree_has_its_shape_whatever_the_text(
    load: Load, eagle1_dir: Path, target: Target, target_dir: Path, reference: ReferenceEagle1
) -> None:
    for seed in (1, 2):
        tokens, drafter = text(11, seed=seed), load(eagle1_dir)
        _start(drafter, target, 1, tokens)
        entry = _draft(drafter, 5, 40)
        assert set(_rank_paths(reference, target_dir, tokens, entry)) == set(reference_paths())
        assert len(entry.tokens) == 25
        smaller = _draft(drafter, 3, 9)
        assert set(_rank_paths(reference, target_dir, tokens, smaller)) == set(reference_paths(3, 9))


def test_measured_accuracies_shape_the_tree(
    target: Target, target_dir: Path, reference: ReferenceEagle1, eagle1_tensors: dict[str, Tensor], tmp_path: Path
) -> None:  # fmt: skip
    table = [[0.5, 0.2, 0.1], [0.4, 0.3, 0.2], [0.3, 0.1, 0.1]]
    save_drafter(tmp_path, eagle1_config(target_dir, rank_accuracies=table), eagle1_tensors)
    drafter, tokens = load_drafter(tmp_path, target_dir, dtype=torch.float32), text(11, seed=5)
    _start(drafter, target, 1, tokens)
    entry = _draft(drafter, 3, 8)
    assert set(_rank_paths(reference, target_dir, tokens, entry)) == set(StaticRule(table).paths(3, 8))


def per_depth(paths: Sequence[tuple[int, ...]]) -> list[int]:
    depths = [len(path) for path in paths]
    return [depths.count(depth) for depth in range(1, max(depths) + 1)]


def is_whole(paths: Sequence[tuple[int, ...]]) -> bool:
    return all(len(path) == 1 or path[:-1] in paths[:place] for place, path in enumerate(paths))


def test_the_reference_tree_is_the_published_one() -> None:
    assert per_depth(reference_paths()) == [4, 8, 8, 3, 2]
    assert len(set(reference_paths())) == 25
    for size in range(1, 26):
        cut = reference_paths(5, size)
        assert len(cut) == size
        assert is_whole(cut)
    assert per_depth(reference_paths(2, 99)) == [4, 8]


@pytest.mark.parametrize("seed", range(4))
def test_the_shape_is_the_best_of_all_for_its_accuracies(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    table = (torch.rand(3, 2, generator=random) * 0.5).tolist()
    every = [path for n in (1, 2, 3) for path in itertools.product(range(2), repeat=n)]
    for size in (1, 3, 5):
        best = max(
            expected_tokens(nodes, table) for nodes in itertools.combinations(every, size) if is_whole(nodes)
        )
        found = StaticRule(table).paths(3, size)
        assert expected_tokens(found, table) == pytest.approx(best)
        assert len(found) == size
        assert is_whole(found)


def test_a_rule_with_accuracies_never_expects_less_than_the_reference_tree() -> None:
    table = [[0.6, 0.15, 0.08, 0.05, 0.03], [0.55, 0.15, 0.1, 0.05, 0.02]] * 3
    for depth, size in ((5, 25), (3, 10), (6, 40)):
        searched = expected_tokens(StaticRule(table).paths(depth, size), table)
        assert searched >= expected_tokens(StaticRule().paths(depth, size), table)
    assert max(map(len, StaticRule([[0.9]]).paths(7, 20))) == 7  # deeper than it was measured
    assert expected_tokens([(0,), (0, 1)], table) == pytest.approx(1.0 + 0.6 + 0.6 * 0.15)


def test_the_same_weights_serve_as_eagle2(
    load: Load, eagle1_dir: Path, eagle2_dir: Path, target: Target
) -> None:
    first, second, tokens = load(eagle1_dir), load(eagle2_dir), text(16, seed=9)
    assert isinstance(first, Eagle1Drafter)
    assert not isinstance(first, Eagle2Drafter)
    assert isinstance(second, Eagle2Drafter)
    assert (eagle1_dir / "model.safetensors").read_bytes() == (eagle2_dir / "model.safetensors").read_bytes()
    one, two = (json.loads((d / "config.json").read_text()) for d in (eagle1_dir, eagle2_dir))
    assert {k for k in one if one[k] != two[k]} == {"method"}
    for drafter in (first, second):
        _start(drafter, target, 1, tokens)
    assert _draft(first, 5).tokens == _draft(second, 5).tokens
    assert _draft(first, 4, 12).tokens != _draft(second, 4, 12).tokens


def test_a_dynamic_tree_holds_the_likeliest_paths(
    load: Load, eagle2_dir: Path, target: Target, target_dir: Path, reference: ReferenceEagle1
) -> None:
    """Against all that such a tree may hold, scored by the reference."""
    tokens, drafter = text(13, seed=4), load(eagle2_dir)
    _start(drafter, target, 1, tokens)
    entry = _draft(drafter, 2, 8)
    embedding, features = embedding_of(target_dir), final_norms(target_dir, tokens)[:-1]

    def following(before: tuple[int, ...]) -> tuple[list[float], list[int]]:
        logits = chain_logits(reference, lambda x: embedding @ x, features, tokens, before)[-1]  # type: ignore[arg-type]
        top = logits.log_softmax(-1).topk(DynamicRule(8).branch(2, 8))
        return top.values.tolist(), top.indices.tolist()

    scores: dict[tuple[int, ...], float] = {}
    for score, token in zip(*following(()), strict=True):
        scores[(token,)] = score
    run = sorted(scores, key=lambda path: -scores[path])[:5]
    for path in run:
        for score, token in zip(*following(path), strict=True):
            scores[(*path, token)] = scores[path] + score
    wanted = set(sorted(scores, key=lambda path: -scores[path])[:8])
    found: list[tuple[int, ...]] = []
    for token, parent in zip(entry.tokens, entry.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    assert set(found) == wanted


def test_at_equal_nodes_the_dynamic_tree_expects_at_least_as_much(
    load: Load, eagle1_dir: Path, eagle2_dir: Path, target: Target
) -> None:
    """Summed over texts, with the drafter's own probabilities as acceptance (what EAGLE-2 rests on)."""
    first, second = load(eagle1_dir), load(eagle2_dir)
    sums = {first: 0.0, second: 0.0}
    for seed in range(8):
        tokens = text(10 + seed, seed=seed)
        for drafter in (first, second):
            _start(drafter, target, 1, tokens)
            entry = _draft(drafter, 4, 12)
            assert len(entry.tokens) == 12
            scores: list[float] = []
            for log_prob, parent in zip(entry.log_probs, entry.parents, strict=True):
                scores.append(log_prob + (scores[parent] if parent >= 0 else 0.0))
            sums[drafter] += sum(map(math.exp, scores))
    assert sums[second] > sums[first]


def test_damaged_checkpoints_are_refused_by_name(
    target_dir: Path, eagle1_tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    broken = {**eagle1_tensors, "layers.0.input_layernorm.weight": torch.ones(64)}
    del broken["fc.bias"]
    save_drafter(tmp_path, eagle1_config(target_dir), broken)
    with pytest.raises(
        CheckpointError, match=r"fc\.bias is missing; layers\.0\.input_layernorm\.weight is surplus"
    ):
        load_drafter(tmp_path, target_dir)
    for changes, words in (
        ({"rank_accuracies": [[0.5], []]}, "rank_accuracies"),
        ({"rank_accuracies": [[1.5]]}, "rank_accuracies"),
        ({"num_heads": 3}, "self_attn"),
        ({"target_vocab": VOCAB + 1}, "embedding"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type"),
        ({"fc_bias": "yes"}, "fc_bias"),
    ):
        save_drafter(tmp_path, eagle1_config(target_dir, **changes), eagle1_tensors)
        with pytest.raises(CheckpointError, match=words):
            load_drafter(tmp_path, target_dir)
