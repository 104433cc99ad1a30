"""EAGLE-3 serving: equal to a slow reference and to its training objective, through rejections and batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.methods.checkpoint import CheckpointError, DrafterConfig, save_drafter
from paceline.methods.drafter import Drafter, DraftRequest
from paceline.methods.eagle3.objective import Eagle3Objective
from paceline.methods.loading import load_drafter
from paceline.sampling.params import SamplingParams
from paceline.training.data import Batch
from paceline.training.objective import TargetReference
from tests.methods.conftest import DRAFT_IDS, SHAPE, TAP_LAYERS, VOCAB, Target, text

Load = Callable[[Path], Drafter]


@pytest.fixture
def drafter(load: Load, eagle3_dir: Path) -> Drafter:
    return load(eagle3_dir)


def _start(drafter: Drafter, target: Target, sequence_id: int, tokens: list[int]) -> None:
    drafter.open(sequence_id, tokens)
    drafter.feed(sequence_id, 0, target.features(drafter, tokens)[:-1])


def _draft(drafter: Drafter, sequence_id: int, num_tokens: int) -> tuple[int, ...]:
    (entry,) = drafter.draft([DraftRequest(sequence_id, num_tokens)])
    assert entry is not None
    return entry.tokens


def _turn(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions by complex multiplication: entry i pairs with entry i + head_dim / 2."""
    half = SHAPE.head_dim // 2
    rate = SHAPE.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.polar(torch.ones(1, dtype=torch.float64), positions[:, None].double() * rate)[:, None]
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * angle
    return torch.cat([turned.real, turned.imag], dim=-1).float()


def reference_chain(
    w: dict[str, Tensor],
    embedding: Tensor,
    taps: Tensor,
    tokens: list[int],
    steps: int,
    forced: Sequence[int] = (),
) -> list[int]:
    """Greedy chain behind some forced tokens, everything recomputed for every token: no cache, no packing, no batch."""
    fused = taps[: len(tokens) - 1] @ w["fc.weight"].T
    states = list(fused)
    words = list(tokens[1:])
    drafted: list[int] = []

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + SHAPE.rms_eps).rsqrt() * w[name]

    for step in range(steps):
        s = torch.stack(states)
        e = norm(embedding[torch.tensor(words)], "midlayer.input_layernorm.weight")
        a = torch.cat([e, norm(s, "midlayer.hidden_norm.weight")], dim=-1)
        n = len(words)
        positions = torch.arange(n)
        q, k, v = (
            (a @ w[f"midlayer.self_attn.{x}_proj.weight"].T).view(n, -1, SHAPE.head_dim)
            for x in ("q", "k", "v")
        )
        q, k = _turn(q, positions), _turn(k, positions)
        groups = SHAPE.num_heads // SHAPE.num_kv_heads
        scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(groups, 1)) / math.sqrt(SHAPE.head_dim)
        scores = scores.masked_fill(positions[None, :] > positions[:, None], -torch.inf)
        mixed = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v.repeat_interleave(groups, 1)).reshape(
            n, -1
        )
        x = s + mixed @ w["midlayer.self_attn.o_proj.weight"].T
        m = norm(x, "midlayer.post_attention_layernorm.weight")
        gated = F.silu(m @ w["midlayer.mlp.gate_proj.weight"].T) * (m @ w["midlayer.mlp.up_proj.weight"].T)
        x = x + gated @ w["midlayer.mlp.down_proj.weight"].T
        logits = norm(x[-1], "norm.weight") @ w["lm_head.weight"].T
        best = int(logits.argmax())
        drafted.append(forced[step] if step < len(forced) else best + int(w["d2t"][best]))
        states.append(x[-1])
        words.append(drafted[-1])
    return drafted


def _embedding(target_dir: Path) -> Tensor:
    from safetensors.torch import load_file

    return load_file(target_dir / "model.safetensors")["model.embed_tokens.weight"]


@pytest.mark.parametrize("length", [2, 9, 33])
def test_chain_equals_reference(
    drafter: Drafter, target: Target, target_dir: Path, eagle3_tensors: dict[str, Tensor], length: int
) -> None:
    tokens = text(length, seed=length)
    _start(drafter, target, 7, tokens)
    expected = reference_chain(eagle3_tensors, _embedding(target_dir), target.taps(tokens), tokens, 6)
    assert list(_draft(drafter, 7, 6)) == expected
    assert set(expected) <= set(DRAFT_IDS)
    assert len(set(expected)) > 1


def test_serving_equals_training(
    drafter: Drafter, target: Target, target_dir: Path, eagle3_tensors: dict[str, Tensor]
) -> None:
    tokens = text(20, seed=3)
    _start(drafter, target, 1, tokens)
    drafted = _draft(drafter, 1, 4)
    embedding = _embedding(target_dir)
    parameters = {k: eagle3_tensors[k] for k in SHAPE.parameter_shapes()}
    objective = Eagle3Objective(
        SHAPE,
        parameters,
        embedding,
        embedding,
        torch.tensor(DRAFT_IDS),
        torch.ones(3 * SHAPE.target_hidden),
        TargetReference("", "tiny", tuple(TAP_LAYERS), 64),
        dtype=torch.float32,
    )
    whole = torch.tensor([[*tokens, *drafted]])
    batch = Batch(
        tokens=whole,
        top_tokens=torch.zeros_like(whole),
        is_answer=torch.ones_like(whole, dtype=torch.bool),
        is_greedy=torch.ones(1, dtype=torch.bool),
        lengths=torch.tensor([whole.shape[1]]),
        taps=target.taps(whole[0].tolist())[None],
        hidden=torch.zeros(1, whole.shape[1], SHAPE.target_hidden),
    )
    # The last row of true features is the one before the root; step j of the test stands j drafted tokens later.
    row = len(tokens) - 2
    head = eagle3_tensors["lm_head.weight"]
    with torch.no_grad():
        weights = {k: p.detach() for k, p in objective.named_parameters().items()}
        steps = [out[0, row] for out in objective.unroll(weights, batch, 4)]
    assert [DRAFT_IDS[int((head @ out).argmax())] for out in steps] == list(drafted)


def test_coupled_drafts_repeat_and_stay_in_the_draft_vocabulary(
    load: Load, eagle3_dir: Path, target: Target
) -> None:
    tokens = text(14, seed=2)
    sampling = SamplingParams(temperature=1.0, seed=11)
    drafted = []
    for _ in range(2):
        drafter = load(eagle3_dir)
        _start(drafter, target, 1, tokens)
        (entry,) = drafter.draft([DraftRequest(1, 8, sampling=sampling)])
        assert entry is not None
        drafted.append(entry.tokens)
    assert drafted[0] == drafted[1]
    assert set(drafted[0]) <= set(DRAFT_IDS)
    drafter = load(eagle3_dir)
    _start(drafter, target, 1, tokens)
    assert drafted[0] != _draft(drafter, 1, 8)


def test_tree_is_topological_bounded_and_holds_the_greedy_chain(drafter: Drafter, target: Target) -> None:
    tokens = text(16, seed=9)
    _start(drafter, target, 1, tokens)
    (entry,) = drafter.draft([DraftRequest(1, 4, max_nodes=12)])
    chain = _draft(drafter, 1, 4)
    assert entry is not None
    entry.check(max_tokens=12, vocab_size=VOCAB)
    assert entry.start == 16
    assert len(entry.tokens) == 12
    siblings = list(zip(entry.parents, entry.tokens, strict=True))
    assert len(set(siblings)) == len(siblings)
    first = max(
        (i for i, parent in enumerate(entry.parents) if parent == -1), key=lambda i: entry.log_probs[i]
    )
    assert entry.tokens[first] == chain[0]


def test_a_drafter_for_another_target_is_refused(
    eagle3_dir: Path, eagle3_tensors: dict[str, Tensor], target_dir: Path, tmp_path: Path
) -> None:
    config = DrafterConfig.read(eagle3_dir)
    save_drafter(tmp_path, DrafterConfig("eagle3", "0" * 64, "other", config.shape), eagle3_tensors)
    with pytest.raises(CheckpointError, match="made for target 'other'"):
        load_drafter(tmp_path, target_dir)


def test_damaged_checkpoints_are_refused_by_name(
    eagle3_dir: Path, eagle3_tensors: dict[str, Tensor], target_dir: Path, tmp_path: Path
) -> None:
    config = DrafterConfig.read(eagle3_dir)
    with pytest.raises(CheckpointError, match="no config"):
        load_drafter(tmp_path, target_dir)
    broken = dict(eagle3_tensors)
    del broken["norm.weight"]
    broken["fc.weight"] = broken["fc.weight"][:, :-1]
    save_drafter(tmp_path, config, broken)
    with pytest.raises(
        CheckpointError, match=r"fc\.weight has shape.*norm\.weight is missing|norm\.weight is missing.*fc"
    ):
        load_drafter(tmp_path, target_dir)
    beyond = {**eagle3_tensors, "d2t": eagle3_tensors["d2t"] + VOCAB}
    save_drafter(tmp_path, config, beyond)
    with pytest.raises(CheckpointError, match="d2t"):
        load_drafter(tmp_path, target_dir)


def test_more_children_are_proposed_than_nodes_expanded(load: Load, eagle3_dir: Path, target: Target) -> None:
    """Two nodes are expanded at each depth, but a third child of the root may be kept all the same."""
    drafter, most = load(eagle3_dir), 0
    for seed in range(12):
        tokens = text(9, seed=seed)
        _start(drafter, target, seed, tokens)
        (entry,) = drafter.draft([DraftRequest(seed, 3, max_nodes=5)])
        assert entry is not None
        assert len(entry.tokens) == 5
        most = max(most, sum(parent < 0 for parent in entry.parents))
    assert most >= 3
