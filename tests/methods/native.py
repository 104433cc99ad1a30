"""A target with a head of its own, random checkpoints for it, and texts: for tests of layers on the CPU kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.drafts import DraftEntry
from paceline.methods.checkpoint import DrafterConfig, save_drafter
from paceline.methods.drafter import Drafter, DraftRequest
from paceline.methods.eagle.fused_shape import Eagle3Shape
from paceline.models import model_fingerprint

VOCAB, WIDTH = 97, 64
SHAPE = {
    "hidden": WIDTH,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,  # not hidden / heads
    "intermediate": 96,
    "target_vocab": VOCAB,
    "max_positions": 512,
    "rms_eps": 1e-5,
}


def save_target(path: Path, **changes: object) -> Path:
    """A random target of two layers with a head of its own, and widths that the kernels take."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        **changes,
    }
    LlamaForCausalLM(LlamaConfig(**sizes)).bfloat16().save_pretrained(path)
    return path


def save_random(
    path: Path,
    target_dir: Path,
    method: str,
    variant: Mapping[str, object],
    parameter_shapes: Callable[[DrafterConfig], dict[str, tuple[int, ...]]],
) -> Path:
    """Random weights of a method whose sizes are `SHAPE` and `variant`."""
    config = DrafterConfig(method, model_fingerprint(target_dir), "tiny", {**SHAPE, **variant})
    random = torch.Generator().manual_seed(5)
    tensors = {}
    for name, size in parameter_shapes(config).items():
        values = torch.randn(size, generator=random)
        is_norm = name.endswith("norm.weight")
        tensors[name] = (1.0 + 0.2 * values if is_norm else values * size[-1] ** -0.5).bfloat16()
    save_drafter(path, config, tensors)
    return path


def save_eagle3(path: Path, target_dir: Path) -> tuple[Path, Path]:
    """A random EAGLE-3 drafter with a vocabulary of its own, and its random target of four layers."""
    draft_vocab = 50
    shape_of = Eagle3Shape(
        hidden=WIDTH,
        target_hidden=WIDTH,
        num_taps=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        intermediate=96,
        draft_vocab=draft_vocab,
        target_vocab=VOCAB,
        rope_theta=10000.0,
        rms_eps=1e-5,
    )
    save_target(target_dir, num_hidden_layers=4, tie_word_embeddings=True, initializer_range=0.02)
    random = torch.Generator().manual_seed(5)
    tensors: dict[str, torch.Tensor] = {}
    for name, size in shape_of.parameter_shapes().items():
        values = torch.randn(size, generator=random)
        tensors[name] = (1.0 + 0.2 * values if len(size) == 1 else values * 1.5 * size[-1] ** -0.5).bfloat16()
    ids = torch.arange(draft_vocab) + 3
    tensors["d2t"] = ids - torch.arange(draft_vocab)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    shape = shape_of.checkpoint_shape([0, 1, 2]) | {"max_positions": 512}
    save_drafter(path, DrafterConfig("eagle3", model_fingerprint(target_dir), "tiny", shape), tensors)
    return path, target_dir


def random_features(count: int, seed: int) -> torch.Tensor:
    """`[count, WIDTH]` bfloat16."""
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()


def random_text(count: int, seed: int) -> list[int]:
    """Tokens that end nothing."""
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def draft_one(drafter: Drafter, sequence_id: int, num_tokens: int, max_nodes: int = 0) -> DraftEntry:
    """A draft that must be there."""
    (entry,) = drafter.draft([DraftRequest(sequence_id, num_tokens, max_nodes)])
    assert entry is not None
    return entry
