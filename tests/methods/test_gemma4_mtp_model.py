"""Gemma 4's assistant is what transformers computes: logits, projected state, windows, clusters and whole drafts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

from paceline.methods.checkpoint import CheckpointError
from paceline.methods.gemma4_mtp.assistant import read_model
from paceline.methods.gemma4_mtp.clustered_head import ClusteredHead
from paceline.methods.gemma4_mtp.model import FULL, SLIDING, Gemma4MtpModel, attend_all
from paceline.methods.layouts.public_checkpoint import PublicCheckpoint

VOCAB, BACKBONE, WINDOW = 96, 40, 7
HEADS = {SLIDING: (2, 16), FULL: (1, 32)}  # key heads and their width


def save(path: Path, clustered: bool) -> Gemma4AssistantForCausalLM:
    torch.manual_seed(3)
    text = Gemma4TextConfig(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True,
        sliding_window=WINDOW, layer_types=[SLIDING] * 3 + [FULL], hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0, num_kv_shared_layers=4, max_position_embeddings=512, initializer_range=0.3,
    )  # fmt: skip
    config = Gemma4AssistantConfig(
        text_config=text, backbone_hidden_size=BACKBONE, use_ordered_embeddings=clustered, num_centroids=12,
        centroid_intermediate_top_k=3,
    )  # fmt: skip
    model = Gemma4AssistantForCausalLM(config).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("norm.weight", "layer_scalar")):
                tensor.copy_(1.0 + 0.3 * torch.randn(tensor.shape))
        if clustered:
            model.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB))
    model.save_pretrained(path)
    return model


@pytest.fixture(params=[False, True], ids=["dense", "clustered"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Gemma4AssistantForCausalLM, Gemma4MtpModel]:
    reference = save(tmp_path, request.param)
    return reference, Gemma4MtpModel(*read_model(PublicCheckpoint.open(tmp_path)))


def caches(rows: int, seed: int = 1) -> dict[str, tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(seed)
    return {
        kind: tuple(torch.randn(1, heads, rows, dim, generator=random) for _ in range(2))  # type: ignore[misc]
        for kind, (heads, dim) in HEADS.items()
    }


@dataclass(frozen=True)
class TargetCache:
    """Keys and values of one of the target's layers, `[kv_heads, rows, head_dim]` each."""

    keys: Tensor
    values: Tensor


def step(
    model: Gemma4MtpModel, embedded: Tensor, state: Tensor, position: int, caches: Mapping[str, TargetCache]
) -> tuple[Tensor, Tensor]:
    """Rows of one sequence at one position: logits `[n, vocab]`, and the next step's `state`."""

    def attend(kind: str, queries: Tensor) -> Tensor:
        keys, values = caches[kind].keys, caches[kind].values
        if kind == SLIDING:
            keys, values = (part[:, -(model.shape.sliding_window + 1) :] for part in (keys, values))
        return attend_all(queries, keys, values)

    positions = torch.full((embedded.shape[0],), position)
    output, state = model.forward(embedded, state, positions, attend)
    return model.logits(output), state


def draft_greedily(
    model: Gemma4MtpModel, table: Tensor, token: int, state: Tensor, position: int, caches: Mapping[str, TargetCache],
    num_tokens: int,
) -> list[int]:  # fmt: skip
    """The likeliest chain behind a token: every step at one position, on the caches as they are."""
    drafted: list[int] = []
    for _ in range(num_tokens):
        logits, state = step(model, table[token][None] * BACKBONE**0.5, state, position, caches)
        token = int(logits.argmax())
        drafted.append(token)
    return drafted


def ours(states: dict[str, tuple[Tensor, Tensor]]) -> dict[str, TargetCache]:
    return {kind: TargetCache(keys[0], values[0]) for kind, (keys, values) in states.items()}


@pytest.mark.parametrize("rows", [1, 5, WINDOW + 1, WINDOW + 2, 40])
@torch.no_grad()
def test_a_step_is_that_of_transformers(
    pair: tuple[Gemma4AssistantForCausalLM, Gemma4MtpModel], rows: int
) -> None:
    reference, model = pair
    random = torch.Generator().manual_seed(rows)
    embedded, state = torch.randn(2, 1, BACKBONE, generator=random)
    shared = caches(rows)
    expected = reference(
        inputs_embeds=torch.cat([embedded, state], dim=-1)[None],
        position_ids=torch.tensor([[rows - 1]]),
        attention_mask=torch.ones(1, rows, dtype=torch.int64),
        shared_kv_states=shared,
    )
    logits, projected = step(model, embedded, state, rows - 1, ours(shared))
    torch.testing.assert_close(projected, expected.last_hidden_state[0], rtol=1e-4, atol=1e-4)
    scored = logits.isfinite()
    torch.testing.assert_close(logits[scored], expected.logits[0][scored], rtol=1e-4, atol=1e-4)
    assert int(logits.argmax()) == int(expected.logits.argmax())
    if model.shape.num_clusters:
        assert int(scored.sum()) == 3 * VOCAB // 12
        assert float(expected.logits[0][~scored].max()) < float(logits[scored].min())
    else:
        assert bool(scored.all())


@torch.no_grad()
def test_rows_do_not_see_one_another(pair: tuple[Gemma4AssistantForCausalLM, Gemma4MtpModel]) -> None:
    _, model = pair
    embedded, state = torch.randn(2, 5, BACKBONE, generator=torch.Generator().manual_seed(4))
    shared = ours(caches(11))
    together = step(model, embedded, state, 10, shared)
    for row in range(5):
        alone = step(model, embedded[row : row + 1], state[row : row + 1], 10, shared)
        for whole, part in zip(together, alone, strict=True):
            torch.testing.assert_close(whole[row : row + 1], part, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_draft_is_that_of_the_published_loop(
    pair: tuple[Gemma4AssistantForCausalLM, Gemma4MtpModel],
) -> None:
    reference, model = pair
    random = torch.Generator().manual_seed(6)
    table = torch.randn(VOCAB, BACKBONE, generator=random)
    first = torch.randn(1, BACKBONE, generator=random)
    shared, rows, token, state, expected = caches(19), 19, 5, first, []
    for _ in range(6):
        embedded = table[token][None] * BACKBONE**0.5
        output = reference(
            inputs_embeds=torch.cat([embedded, state], dim=-1)[None],
            position_ids=torch.tensor([[rows - 1]]),
            shared_kv_states=shared,
        )
        token, state = int(output.logits.argmax()), output.last_hidden_state[0]
        expected.append(token)
    assert draft_greedily(model, table, 5, first, rows - 1, ours(shared), 6) == expected
    assert len(set(expected)) > 1


def test_the_clustered_head_finds_what_a_dense_one_finds_in_the_same_clusters() -> None:
    random = torch.Generator().manual_seed(2)
    centroids, table = torch.randn(8, 16, generator=random), torch.randn(64, 16, generator=random)
    order, state = torch.randperm(64, generator=random), torch.randn(10, 16, generator=random)
    dense = state @ table.T
    torch.testing.assert_close(ClusteredHead(centroids, order, table, 8).logits(state), dense)
    some = ClusteredHead(centroids, order, table, 2).logits(state)
    best = (state @ centroids.T).topk(2).indices
    for row in range(10):
        members = set(order.view(8, 8)[best[row]].flatten().tolist())
        assert set(some[row].isfinite().nonzero().flatten().tolist()) == members
    assert some.softmax(-1).sum(-1).tolist() == pytest.approx([1.0] * 10)


def ropes(**changes: object) -> dict[str, dict[str, object]]:
    return {SLIDING: {"rope_type": "default"}, FULL: {"rope_type": "proportional", **changes}}


def test_damaged_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, clustered=True)
    content = json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    for name, changed, words in (
        ("model.norm.weight", None, r"model\.norm\.weight is missing"),
        ("model.layers.0.self_attn.k_proj.weight", torch.ones(2), r"k_proj\.weight is surplus"),
        ("pre_projection.weight", torch.ones(3), "pre_projection.weight has shape"),
        ("masked_embedding.token_ordering", torch.zeros(VOCAB, dtype=torch.int64), "every token once"),
        ("masked_embedding.token_ordering", torch.arange(VOCAB).float(), "whole numbers"),
    ):
        broken = {k: v for k, v in tensors.items() if k != name} | (
            {} if changed is None else {name: changed}
        )
        save_file(broken, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=words):
            read_model(PublicCheckpoint.open(tmp_path))
    save_file(tensors, tmp_path / "model.safetensors")
    for outer, inner, words in (
        ({"model_type": "gemma4"}, {}, "model_type"),
        ({"num_centroids": 7}, {}, "num_centroids"),
        ({"backbone_hidden_size": 0}, {}, "backbone_hidden_size"),
        ({}, {"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        ({}, {"enable_moe_block": True}, "enable_moe_block"),
        ({}, {"layer_types": [FULL]}, "layer_types"),
        ({}, {"layer_types": [FULL, FULL, FULL, [FULL]]}, "layer_types"),
        ({}, {"rope_parameters": [1]}, "rope_parameters"),
        ({}, {"rope_parameters": ropes(rope_theta="x")}, f"rope_parameters.{FULL}.rope_theta"),
        ({}, {"rope_parameters": ropes(partial_rotary_factor=1.5)}, "partial_rotary_factor.* at most 1"),
        ({}, {"rms_norm_eps": "x"}, "rms_norm_eps"),
        ({}, {"per_layer_config": [1], "global_head_dim": None}, "global_head_dim"),
        ({}, {"per_layer_config": {"3": {"head_dim": []}}, "global_head_dim": ...}, "head_dim"),
        ({}, {"per_layer_config": [1], "global_head_dim": ...}, "per_layer_config"),
        ({}, {"rope_parameters": {SLIDING: {"rope_type": "yarn"}, FULL: {"rope_type": "default"}}}, SLIDING),
    ):
        text_config = {**content["text_config"], **inner}
        text_config = {name: value for name, value in text_config.items() if value is not ...}  # left out
        changed_config = {**content, **outer, "text_config": text_config}
        (tmp_path / "config.json").write_text(json.dumps(changed_config))
        with pytest.raises(CheckpointError, match=words):
            read_model(PublicCheckpoint.open(tmp_path))
