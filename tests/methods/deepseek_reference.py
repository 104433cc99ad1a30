"""DeepSeek-V3's blocks as transformers computes them, beside our description of the same block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RotaryEmbedding,
)

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    "original_max_position_embeddings": 64,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "experts in groups": {},
    "no latent of queries": {"q_lora_rank": None},
    "yarn": {"rope_parameters": YARN},
    "dense": {"first_k_dense_replace": 9},
    "halves": {"rope_interleave": False},
    "one group": {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
    "two shared": {"n_shared_experts": 2, "num_experts_per_tok": 1},
    "wide values": {"v_head_dim": 20},
}
"""What differs from :func:`deepseek_config`'s own values."""


def deepseek_config(**changes: Any) -> DeepseekV3Config:
    """A tiny model's."""
    base: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 10,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 900.0},
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return DeepseekV3Config(**{**base, **changes}, attn_implementation="eager")


def decoder_layer(config: DeepseekV3Config, seed: int = 0) -> DeepseekV3DecoderLayer:
    """A layer behind the model's last, with random weights."""
    layer = DeepseekV3DecoderLayer(config, config.num_hidden_layers).eval()
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in layer.state_dict().items():
            noise = torch.randn(tensor.shape, generator=random)
            if name.endswith("correction_bias"):
                tensor.copy_(noise * 0.2)
            else:
                tensor.copy_(1.0 + 0.2 * noise if tensor.ndim == 1 else noise * tensor.shape[-1] ** -0.5)
    return layer


def layer_tensors(layer: DeepseekV3DecoderLayer) -> dict[str, Tensor]:
    """A layer's tensors as DeepSeek's files name them: an expert's matrices each by itself."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in layer.state_dict().items():
        if name == "mlp.experts.gate_up_proj":
            for index, both in enumerate(tensor):
                gate, up = both.chunk(2)
                tensors[f"mlp.experts.{index}.gate_proj.weight"] = gate.contiguous()
                tensors[f"mlp.experts.{index}.up_proj.weight"] = up.contiguous()
        elif name == "mlp.experts.down_proj":
            for index, down in enumerate(tensor):
                tensors[f"mlp.experts.{index}.down_proj.weight"] = down.contiguous()
        else:
            tensors[name] = tensor
    return {name: tensor.clone() for name, tensor in tensors.items()}


def run_layer(
    layer: DeepseekV3DecoderLayer, config: DeepseekV3Config, rows: Tensor, positions: Tensor, mask: Tensor
) -> Tensor:
    """`[n, hidden]` through a layer; mask `[n, n]` bool, True where a row is seen."""
    rotary = DeepseekV3RotaryEmbedding(config)
    bias = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)[None, None]
    with torch.no_grad():
        output = layer(
            rows[None], attention_mask=bias, position_embeddings=rotary(rows[None], positions[None])
        )
    return (output if isinstance(output, Tensor) else output[0])[0]


def checkpoint_shape(config: DeepseekV3Config) -> dict[str, Any]:
    """The same block as `shape` of our checkpoints."""
    rope = dict(config.rope_parameters)
    is_dense = config.num_hidden_layers < config.first_k_dense_replace
    experts = {
        "num_experts": config.n_routed_experts,
        "num_active": config.num_experts_per_tok,
        "intermediate": config.moe_intermediate_size,
        "num_groups": config.n_group,
        "num_active_groups": config.topk_group,
        "normalizes": config.norm_topk_prob,
        "scale": config.routed_scaling_factor,
    }
    shared = config.moe_intermediate_size * config.n_shared_experts
    return {
        "hidden": config.hidden_size,
        "num_heads": config.num_attention_heads,
        "intermediate": config.intermediate_size if is_dense else shared,
        "target_vocab": config.vocab_size,
        "target_layers": config.num_hidden_layers,
        "max_positions": config.max_position_embeddings,
        "rms_eps": config.rms_norm_eps,
        "rope_parameters": rope,
        "latent": {
            "q_rank": config.q_lora_rank or 0,
            "kv_rank": config.kv_lora_rank,
            "nope_dim": config.qk_nope_head_dim,
            "rope_dim": config.qk_rope_head_dim,
            "value_dim": config.v_head_dim,
            "interleaved": config.rope_interleave,
        },
        **({} if is_dense else {"experts": experts}),
    }
