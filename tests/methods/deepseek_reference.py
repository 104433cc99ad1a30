"""DeepSeek-V3's blocks as transformers computes them, beside our description of the same block."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.modeling_layers import MtpLayer
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
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


def save_target(path: Path, seed: int = 5, **changes: Any) -> DeepseekV3Config:
    """Saves a tiny random model; its expert matrices are files of their own, as published."""
    config = deepseek_config(**changes)
    torch.manual_seed(seed)
    model = DeepseekV3ForCausalLM(config)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "norm" in name:
                tensor.add_(torch.randn(tensor.shape) * 0.2)
            elif name.endswith("correction_bias"):
                tensor.copy_(torch.randn(tensor.shape) * 0.2)
    model.save_pretrained(path)
    return config


def public_module(config: DeepseekV3Config, seed: int = 0) -> tuple[MtpLayer, dict[str, Tensor]]:
    """A prediction module as transformers computes it, and its tensors by DeepSeek's names without their prefix."""
    module = MtpLayer(config, DeepseekV3DecoderLayer, DeepseekV3RMSNorm, config.num_hidden_layers).eval()
    module.mtp_block = decoder_layer(config, seed)
    random = torch.Generator().manual_seed(seed + 100)
    with torch.no_grad():
        for norm in (module.enorm, module.hnorm, module.post_norm):
            norm.weight.copy_(1.0 + 0.2 * torch.randn(norm.weight.shape, generator=random))
        module.eh_proj.weight.copy_(torch.randn(module.eh_proj.weight.shape, generator=random) * 0.2)
    outside = {
        "enorm.weight": module.enorm.weight,
        "hnorm.weight": module.hnorm.weight,
        "eh_proj.weight": module.eh_proj.weight,
        "shared_head.norm.weight": module.post_norm.weight,
    }
    return module, layer_tensors(module.mtp_block) | {k: v.detach().clone() for k, v in outside.items()}


class DeepseekReference:
    """Modules in sequence over a target's embedding and head, without caches, from transformers' own layers."""

    def __init__(
        self,
        config: DeepseekV3Config,
        modules: Sequence[MtpLayer],
        target: Mapping[str, Tensor],
        carries_norm: bool,
    ) -> None:
        self._config, self._modules, self._carries_norm = config, modules, carries_norm
        self._embedding, self._head = target["model.embed_tokens.weight"], target["lm_head.weight"]

    @torch.no_grad()
    def logits(self, features: Tensor, tokens: Sequence[int], drafted: Sequence[int]) -> Tensor:
        """Logits of the token behind `tokens`, and behind each of a chain, by one module: `[1 + len(drafted), vocab]`.

        Rows of true features first; a drafted token's row reads what the row before it gave.
        """
        (module,) = self._modules
        whole = [*tokens, *drafted]
        embedded = self._embedding[whole[1:]]
        states, found = features[: len(tokens) - 1], []
        for _ in range(1 + len(drafted)):
            n = len(states)
            mask = torch.ones(n, n, dtype=torch.bool).tril()
            joined = module.eh_proj(torch.cat([module.enorm(embedded[:n]), module.hnorm(states)], dim=-1))
            raw = run_layer(module.mtp_block, self._config, joined, torch.arange(n), mask)
            normed = module.post_norm(raw)
            found.append(normed[-1] @ self._head.T)
            states = torch.cat([states, (normed if self._carries_norm else raw)[-1:]])
        return torch.stack(found)


def publish(
    path: Path,
    target_dir: Path,
    config: DeepseekV3Config,
    modules: Sequence[Mapping[str, Tensor]],
    **changes: Any,
) -> Path:
    """The model and its modules in one directory, with DeepSeek's configuration."""
    model = load_file(target_dir / "model.safetensors")
    for index, tensors in enumerate(modules):
        prefix = f"model.layers.{config.num_hidden_layers + index}."
        model |= {prefix + name: tensor for name, tensor in tensors.items()}
        model[prefix + "embed_tokens.weight"] = model["model.embed_tokens.weight"].clone()
        model[prefix + "shared_head.head.weight"] = model["lm_head.weight"].clone()
    path.mkdir(parents=True, exist_ok=True)
    save_file(model, path / "model.safetensors")
    content = public_config(config) | {"num_nextn_predict_layers": len(modules)} | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))
    return path


def public_config(config: DeepseekV3Config) -> dict[str, Any]:
    """`config.json` with the keys that deepseek-ai/DeepSeek-V3 has."""
    rope = dict(config.rope_parameters)
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "aux_loss_alpha": 0.001,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": config.first_k_dense_replace,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "kv_lora_rank": config.kv_lora_rank,
        "max_position_embeddings": config.max_position_embeddings,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": config.moe_intermediate_size,
        "moe_layer_freq": 1,
        "n_group": config.n_group,
        "n_routed_experts": config.n_routed_experts,
        "n_shared_experts": config.n_shared_experts,
        "norm_topk_prob": config.norm_topk_prob,
        "num_attention_heads": config.num_attention_heads,
        "num_experts_per_tok": config.num_experts_per_tok,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_attention_heads,
        "num_nextn_predict_layers": 1,
        "pretraining_tp": 1,
        "q_lora_rank": config.q_lora_rank,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": None if kind == "default" else {**rope, "type": kind},
        "rope_theta": theta,
        "routed_scaling_factor": config.routed_scaling_factor,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": config.topk_group,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1",
        "use_cache": True,
        "v_head_dim": config.v_head_dim,
        "vocab_size": config.vocab_size,
        **({} if config.rope_interleave else {"rope_interleave": False}),
    }
