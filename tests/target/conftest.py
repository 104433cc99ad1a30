"""Tiny random models, saved as real checkpoints, and the converted default model where it is cached."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}

# Each entry exercises something of its own: tied heads, biases, windows, norms on queries and keys, soft caps,
# two rope bases, scaled rope.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "llama-scaled-rope": {
        "model_type": "llama",
        "tie_word_embeddings": False,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {"sliding_window": 7},
    "qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
    "qwen3": {"tie_word_embeddings": True},
    "gemma2": {"sliding_window": 6, "query_pre_attn_scalar": 12, "tie_word_embeddings": True},
    "gemma3_text": {
        "sliding_window": 5,
        "query_pre_attn_scalar": 24,
        "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    },
}

# Models that the generic executor alone runs, because their keys and values differ in width.
GENERIC: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "num_key_value_heads": 6,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "head_dim": 8,
        "v_head_dim": 10,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "tie_word_embeddings": False,
    },
    "deepseek_v3-dense": {  # experts have no product in float64
        "model_type": "deepseek_v3",
        "num_key_value_heads": 6,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "head_dim": 8,
        "v_head_dim": 10,
        "first_k_dense_replace": 4,
    },
    "deepseek_v3-wide-values": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 6,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "head_dim": 4,
        "v_head_dim": 20,
        "moe_intermediate_size": 24,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
            "original_max_position_embeddings": 64,
        },
    },
    "deepseek_v2": {
        "num_key_value_heads": 6,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "head_dim": 8,
        "v_head_dim": 10,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
    },
}

ModelFactory = Callable[[str], Path]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> ModelFactory:
    """Family name -> directory of a small random checkpoint of it."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            options = {**SHAPE, **(FAMILIES | GENERIC)[family]}
            config = AutoConfig.for_model(options.pop("model_type", family), **options)
            torch.manual_seed(7)
            model = AutoModelForCausalLM.from_config(config).to(torch.float32)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "norm" in name or "bias" in name:
                        parameter.normal_(0.0, 0.2).add_(0.0 if "gemma" in family or "bias" in name else 1.0)
            path = tmp_path_factory.mktemp(family)
            model.save_pretrained(path)
            made[family] = path
        return made[family]

    return make


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The converted default model, or a skip where it was never fetched."""
    given = os.environ.get("PACELINE_TEST_MODEL")
    if given:
        return Path(given)
    from paceline.models import cached

    path = cached("smollm2-135m")
    if path is None:
        pytest.skip("run `paceline models fetch smollm2-135m` first")
    return path
