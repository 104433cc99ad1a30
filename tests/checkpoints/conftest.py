"""A tiny random target, and the kinds of drafters that public checkpoints hold for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.draft_layer import Rows
from paceline.methods.layouts.target_facts import TargetFacts
from paceline.methods.loading import load_drafter
from paceline.target.kv.cache import KVCache
from paceline.target.kv.slot import KVLayout

VOCAB, WIDTH, NUM_LAYERS, NUM_DEPTHS, MASK_TOKEN = 97, 64, 8, 5, 96
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@dataclass(frozen=True)
class Case:
    """A drafter of the speculators format.

    Attributes:
        kind: `speculators_model_type`.
        layer: fields of `transformer_layer_config` that differ from the common ones.
        flags: fields of `config.json` that differ from the common ones.
        draft_vocab: rows of its head.
    """

    kind: str = "eagle3"
    layer: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    draft_vocab: int = 50

    @property
    def layer_config(self) -> dict[str, Any]:
        """The whole `transformer_layer_config`."""
        common = {
            "model_type": "llama",
            "hidden_size": WIDTH,
            "intermediate_size": 96,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": VOCAB,
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "hidden_act": "silu",
        }
        return {**common, **self.layer}

    @property
    def draft_ids(self) -> Tensor:
        """Target id of each draft id."""
        chosen = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[: self.draft_vocab]
        return chosen.sort().values


CASES = {
    "plain": Case(),
    "whole-vocabulary": Case(draft_vocab=VOCAB),
    "normed-residual-wide-heads": Case(layer={"head_dim": 32}, flags={"norm_before_residual": True}),
    "normed-output": Case(flags={"norm_output": True}),
    "qwen3-two-layers": Case(layer={"model_type": "qwen3", "num_hidden_layers": 2}),
    "linear-rope": Case(layer={"rope_parameters": {"rope_type": "linear", "rope_theta": 5e4, "factor": 4.0}}),
    "llama3-rope-three-layers": Case(layer={"rope_parameters": LLAMA3, "num_hidden_layers": 3}),
    "parallel": Case("peagle", layer={"num_hidden_layers": 4}, flags={"mask_token_id": MASK_TOKEN}),
    "parallel-qwen3-whole-vocabulary": Case(
        "peagle",
        layer={"model_type": "qwen3", "num_hidden_layers": 2, "num_key_value_heads": 4},
        flags={"mask_token_id": MASK_TOKEN, "norm_before_residual": True},
        draft_vocab=VOCAB,
    ),
}


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama: 8 layers, 64 wide, 97 tokens."""
    path = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=96,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def target(target_dir: Path) -> TargetFacts:
    """What formats are told of it."""
    return TargetFacts.read(target_dir)


def text(length: int) -> list[int]:
    """Random token ids."""
    return torch.randint(3, VOCAB - 1, (length,), generator=torch.Generator().manual_seed(4)).tolist()


def random_taps(count: int) -> Tensor:
    """Random streams of three layers, `[count, 3 * 64]`."""
    return torch.randn(count, 3 * WIDTH, generator=torch.Generator().manual_seed(5))


def our_logits(directory: Path, target_dir: Path, taps: Tensor, tokens: list[int]) -> Tensor:
    """What the drafter of a checkpoint of ours gives for a text, in float32.

    Args:
        directory: the checkpoint.
        target_dir: its target.
        taps: `[n, 3 * 64]`.
        tokens: that stand behind each tap's position, `n`.

    Returns:
        `[n + 1, draft_vocab]` of an EAGLE-3 drafter: of every true row, and of one that goes on from the last, token 0.
        Of a P-EAGLE drafter `[n - 1 + depths, draft_vocab]`: of every true row, and of the mask rows behind the last.
    """
    drafter: Any = load_drafter(directory, target_dir, dtype=torch.float32)
    assert drafter.tap is not None
    features = taps @ drafter.tap.projection.float().T
    layer, count = drafter._layer, len(tokens)
    layout = drafter._cache.layout
    cache = KVCache(KVLayout(layout.num_layers, *_heads(layer), torch.float32, torch.device("cpu")))
    slot = cache.get(cache.open(64))
    with torch.inference_mode():
        if drafter.method == "p_eagle":
            masks = drafter.num_depths - 1
            states = torch.cat([features, drafter._masked.expand(masks, -1)])
            words = [*tokens, *[drafter._mask_token] * masks]
            rows = Rows(slot, words, states, range(count + masks))
            return layer.forward([rows], range(count + masks)).logits.clone()
        first = layer.forward([Rows(slot, tokens, features, range(count))], range(count))
        slot.length, slot.num_pending = count, 0
        again = layer.forward([Rows(slot, [0], first.states[-1:], [count])], [0])
        return torch.cat([first.logits, again.logits])


def _heads(layer: Any) -> tuple[int, int]:
    return layer.num_kv_heads, layer.head_dim
