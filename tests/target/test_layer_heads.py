"""A Gemma 4, whose layers differ in heads and share keys and values, runs as in transformers, alone and in company."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, Gemma4ForCausalLM, Gemma4TextConfig, GPT2Config, LlamaConfig

from paceline.model.layer_heads import layer_heads
from paceline.target import CachedLayer, SequenceRows, StepError, TapSpec, TargetEngine

SLIDING, FULL = "sliding_attention", "full_attention"
TOKENS = torch.randint(3, 96, (30,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = Gemma4TextConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True,
        sliding_window=8, layer_types=[SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL], hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=96, num_kv_shared_layers=2, max_position_embeddings=256, initializer_range=0.2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("gemma4")
    Gemma4ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> Tensor:
    """`[30, vocab]`, by transformers."""
    with torch.no_grad():
        logits: Tensor = Gemma4ForCausalLM.from_pretrained(model_dir)(torch.tensor([TOKENS])).logits[0]
    return logits


def test_heads_of_each_layer(model_dir: Path) -> None:
    assert layer_heads(AutoConfig.from_pretrained(model_dir)) == (
        (2, 16), (2, 16), (1, 32), (2, 16), (2, 16), (1, 32)
    )  # fmt: skip
    llama = LlamaConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    assert layer_heads(llama) == ((2, 16), (2, 16))
    assert layer_heads(GPT2Config(n_layer=1, n_embd=32, n_head=4)) == ((4, 8),)


def test_it_equals_transformers_in_chunks_forks_and_company(model_dir: Path, expected: Tensor) -> None:
    engine = TargetEngine.load(model_dir, dtype=torch.float32)
    slots = [engine.open() for _ in range(2)]
    for slot in slots:
        engine.step([SequenceRows(slot, TOKENS[:12], num_logits="last")])
    together = engine.step([SequenceRows(slots[0], TOKENS[12:15]), SequenceRows(slots[1], TOKENS[12:20])])
    torch.testing.assert_close(together.logits[0], expected[12:15], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(together.logits[1], expected[12:20], rtol=1e-4, atol=1e-4)
    fork = engine.fork(slots[1], 18, 200)
    engine.close(slots[1])
    rest = engine.step([SequenceRows(fork, TOKENS[18:])]).logits[0]
    torch.testing.assert_close(rest, expected[18:], rtol=1e-4, atol=1e-4)


def test_cached_layers_are_tapped_as_they_lie_in_the_cache(model_dir: Path) -> None:
    tap = TapSpec(norm_final=True, cached=(CachedLayer(3, 2, 16, window=9), CachedLayer(2, 1, 32)))
    assert [(part.width, part.reach) for part in tap.parts(64)] == [(64, 1), (64, 9), (64, 0)]
    engine = TargetEngine.load(model_dir, dtype=torch.float32, taps=[tap])
    slot = engine.open()
    rows = engine.step([SequenceRows(slot, TOKENS[:10], num_logits="none")]).features[0]
    tree = SequenceRows(slot, TOKENS[10:13], parents=[-1, 0, 0], num_logits="none")
    kept = engine.step([tree]).features[0][[0, 2]]
    engine.keep(slot, [0, 2])
    for column, layer in ((1, 3), (2, 2)):
        keys, values = engine.keys_values(slot, layer)  # [kv_heads, 12, head_dim] each
        both = torch.cat((keys, values)).transpose(0, 1).flatten(1)
        assert torch.equal(torch.cat((rows, kept))[:, 64 * column :][:, :64], both)


@pytest.mark.parametrize(
    ("tap", "words"),
    [
        (TapSpec(norm_final=True, cached=(CachedLayer(6, 1, 32),)), "outside 0..5"),
        (TapSpec(norm_final=True, cached=(CachedLayer(0, 1, 32),)), "2 key heads of width 16"),
        (TapSpec(norm_final=True, cached=(CachedLayer(0, 2, 16, window=3),)), "read of all positions"),
        (TapSpec(norm_final=True, last_only=True, cached=(CachedLayer(0, 2, 16),)), "last_only"),
    ],
)
def test_a_tap_that_does_not_fit_is_refused(tap: TapSpec, words: str, model_dir: Path) -> None:
    with pytest.raises(StepError, match=words):
        TargetEngine.load(model_dir, dtype=torch.float32, taps=[tap])
