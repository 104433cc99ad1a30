"""Random checkpoints of Gemma 4's assistant, for a tiny Llama and a tiny Gemma 3."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Gemma4ForCausalLM, Gemma4TextConfig

from paceline.methods.checkpoint import DrafterConfig, save_drafter
from paceline.methods.gemma4_mtp.layer import read_shape
from paceline.methods.gemma4_mtp.model import FULL, SLIDING
from paceline.models import model_fingerprint

VOCAB = 97
WINDOW = 7
COMMON = {"backbone": 64, "hidden": 24, "intermediate": 48, "vocab": VOCAB, "num_heads": 4, "rms_eps": 1e-6}

FOR_LLAMA = {
    **COMMON,
    "layer_types": [FULL, FULL],
    "head_dims": {FULL: 16},
    "kv_heads": {FULL: 2},
    "kv_layers": {FULL: 3},
    "rope_thetas": {FULL: 10000.0},
    "rotary_fractions": {FULL: 1.0},
    "sliding_window": 1,
    "embedding_scale": 1.0,
    "max_positions": 64,
}
"""For the target that all drafters are tested on: four layers, all of them full."""

FOR_GEMMA = {
    **COMMON,
    "vocab": 108,
    "layer_types": [SLIDING, SLIDING, FULL],
    "head_dims": {SLIDING: 16, FULL: 16},
    "kv_heads": {SLIDING: 2, FULL: 2},
    "kv_layers": {SLIDING: 4, FULL: 3},
    "rope_thetas": {SLIDING: 10000.0, FULL: 1e6},
    "rotary_fractions": {SLIDING: 1.0, FULL: 0.25},
    "sliding_window": WINDOW,
    "max_positions": 64,
}


FOR_GEMMA4 = {
    **FOR_GEMMA,
    "head_dims": {SLIDING: 16, FULL: 32},
    "kv_heads": {SLIDING: 2, FULL: 1},
    "kv_layers": {SLIDING: 3, FULL: 2},
}


def random_assistant(config: DrafterConfig, seed: int = 17) -> dict[str, Tensor]:
    """Weights whose chains depend on their tokens."""
    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    shape = read_shape(config)
    for name, size in shape.parameter_shapes().items():
        values = torch.randn(size, generator=random)
        if name.endswith("token_ordering"):
            tensors[name] = torch.randperm(shape.vocab, generator=random)
        elif len(size) == 1:
            tensors[name] = 1.0 + 0.2 * values
        else:
            tensors[name] = values * 1.5 * size[1] ** -0.5
    return tensors


def save_assistant(path: Path, target_dir: Path, shape: dict[str, object]) -> Path:
    """A checkpoint of random weights."""
    config = DrafterConfig("gemma4_mtp", model_fingerprint(target_dir), "tiny", shape)
    save_drafter(path, config, random_assistant(config))
    return path


def save_gemma3(path: Path) -> Path:
    """A random Gemma 3 of five layers, the fourth of them full, that sees eight tokens in the others."""
    torch.manual_seed(4)
    config = Gemma3TextConfig(
        vocab_size=108, hidden_size=64, intermediate_size=96, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=8, max_position_embeddings=256, query_pre_attn_scalar=16,
        layer_types=[SLIDING] * 3 + [FULL, SLIDING], initializer_range=0.2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    Gemma3ForCausalLM(config).save_pretrained(path)
    return path


def save_gemma4(path: Path) -> Path:
    """A random Gemma 4: full layers have heads of their own, and the last two layers no keys and values."""
    torch.manual_seed(5)
    config = Gemma4TextConfig(
        vocab_size=108, hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True,
        sliding_window=8, layer_types=[SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL], hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=108, num_kv_shared_layers=2, max_position_embeddings=256, initializer_range=0.2,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    Gemma4ForCausalLM(config).save_pretrained(path)
    return path
