"""The block of DeepSeek-V3's modules in a public `config.json`: latent attention, and dense MLP or experts, both ways.

Keys and their meaning: transformers' `DeepseekV3Config` and DeepSeek's own configuration, which has more. GLM-4.7-Flash
(`glm4_moe_lite`) has the same block; GLM-4.5 has its experts beside ordinary heads.
"""

from __future__ import annotations

from typing import Any

from paceline.methods.checkpoint import CheckpointError, DrafterConfig
from paceline.methods.latent_attention import latent_shape
from paceline.methods.layouts.public_config import PublicConfig
from paceline.methods.routed_experts import experts_shape

MODEL_TYPES = ("deepseek_v3", "deepseek_mtp", "glm4_moe_lite")
"""Types whose block this is; `deepseek_mtp` is what vLLM and our export call a module by itself."""

_YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")


def has_latent(config: PublicConfig) -> bool:
    """Whether a file describes latent attention. Takes no key."""
    return "kv_lora_rank" in config


def is_standalone(config: PublicConfig) -> bool:
    """Whether a file is a module alone, as SGLang's `export_deepseek_nextn.py` writes it. Takes no key."""
    names = config.peek("architectures")
    return isinstance(names, list) and "DeepseekV3ForCausalLMNextN" in names


def read_sizes(config: PublicConfig) -> dict[str, Any]:
    """Fields of `shape` besides those of attention and MLP.

    Raises:
        CheckpointError: naming a key that is missing, malformed or not supported.
    """
    config.expect("model_type", *MODEL_TYPES, because="other models with latent attention are not computed")
    config.expect("hidden_act", "silu")
    config.expect("partial_rotary_factor", 1.0, because="qk_rope_head_dim says what is rotated")
    # The model type says the class. The module's head is the target's, tied or not.
    config.without_effect("architectures", "tie_word_embeddings", "mlp_layer_types")
    return {
        "hidden": config.size("hidden_size"),
        "num_heads": config.size("num_attention_heads"),
        "target_vocab": config.size("vocab_size"),
        "max_positions": config.size("max_position_embeddings"),
        "rms_eps": config.number("rms_norm_eps"),
        "rope_parameters": _read_rope(config),
    }


def _read_rope(config: PublicConfig) -> dict[str, Any]:
    section = config.section("rope_parameters" if "rope_parameters" in config else "rope_scaling")
    outer = config.number("rope_theta", 10000.0)
    kind = section.text("rope_type", section.text("type", "default"))
    section.without_effect("type")  # an older spelling, beside the newer one
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": section.number("rope_theta", outer)}
    if kind == "yarn":
        rope["factor"] = section.number("factor")
        rope["original_max_position_embeddings"] = section.size("original_max_position_embeddings")
        rope |= {key: section.number(key) for key in _YARN if key in section}
        if "truncate" in section:
            rope["truncate"] = section.switch("truncate")
    elif kind != "default":
        raise section.error("rope_type", "must be default or yarn")
    return rope


def read_latent(config: PublicConfig) -> dict[str, Any]:
    """Fields of `shape` that describe the attention.

    Raises:
        CheckpointError: naming a key that is missing, malformed or not supported.
    """
    heads = config.size("num_attention_heads")
    nope, rope = config.count("qk_nope_head_dim"), config.size("qk_rope_head_dim")
    config.expect("num_key_value_heads", heads, because="every head has a key of its own")
    config.expect("qk_head_dim", nope + rope, because="it is qk_nope_head_dim and qk_rope_head_dim together")
    # transformers writes the rotated part, other programs the whole key.
    config.expect("head_dim", rope, nope + rope, because="the parts of a key are given by qk_..._head_dim")
    config.expect("attention_bias", False)
    config.expect("index_topk", because="attention to chosen positions alone (DeepSeek-V3.2) is not computed")
    return {
        "num_kv_heads": heads,
        "head_dim": nope + rope,
        "latent": {
            "q_rank": config.count("q_lora_rank", 0),
            "kv_rank": config.size("kv_lora_rank"),
            "nope_dim": nope,
            "rope_dim": rope,
            "value_dim": config.size("v_head_dim"),
            "interleaved": config.switch("rope_interleave", True),
        },
    }


def read_mlp(config: PublicConfig, layer: int, count: int) -> dict[str, Any]:
    """Fields of `shape` that describe the MLP of modules: experts from `first_k_dense_replace` on, dense before.

    Args:
        config: the file's.
        layer: index of the first module, counted with the model's layers.
        count: modules.

    Raises:
        CheckpointError: naming a key that is missing, malformed or not supported.
    """
    width = config.size("intermediate_size")
    first = config.count("first_k_dense_replace", 0)
    config.expect("moe_layer_freq", 1, because="experts are in every layer from first_k_dense_replace on")
    if "n_routed_experts" not in config:
        return {"intermediate": width}
    for key in ("norm_topk_prob", "routed_scaling_factor"):
        if key not in config:  # programs differ in what they assume
            raise config.error(key, "must be given")
    config.expect("scoring_func", "sigmoid")
    config.expect("topk_method", "noaux_tc")
    one = config.size("moe_intermediate_size")
    experts = {
        "num_experts": config.size("n_routed_experts"),
        "num_active": config.size("num_experts_per_tok"),
        "intermediate": one,
        "scoring": "sigmoid",
        "num_groups": config.size("n_group", 1),
        "num_active_groups": config.size("topk_group", 1),
        "normalizes": config.switch("norm_topk_prob"),
        "scale": config.number("routed_scaling_factor"),
        "has_correction_bias": True,
        "has_shared_gate": False,
    }
    shared = one * config.count("n_shared_experts", 0)
    if layer >= first:
        return {"intermediate": shared, "experts": experts}
    if layer + count > first:
        raise config.error(
            "first_k_dense_replace", "must be the same side of all modules: they share one shape"
        )
    return {"intermediate": width}


def write_block(config: DrafterConfig) -> dict[str, Any]:
    """Keys of a `config.json` for a module's latent attention and experts; empty for an ordinary block.

    Raises:
        CheckpointError: naming what the layout cannot say.
    """
    content: dict[str, Any] = {}
    latent, experts = latent_shape(config), experts_shape(config)
    if latent is not None:
        content |= {
            "num_key_value_heads": config.size("num_heads"),
            "head_dim": latent.rope_dim,
            "q_lora_rank": latent.q_rank or None,
            "kv_lora_rank": latent.kv_rank,
            "qk_nope_head_dim": latent.nope_dim,
            "qk_rope_head_dim": latent.rope_dim,
            "v_head_dim": latent.value_dim,
            "rope_interleave": latent.interleaved,
        }
    if experts is not None:
        shared = config.shape.get("intermediate")
        if experts.scoring != "sigmoid" or experts.has_shared_gate or not experts.has_correction_bias:
            raise CheckpointError(
                "shape.experts: DeepSeek's layout has scores by sigmoid, a correction bias and no shared gate"
            )
        if not isinstance(shared, int) or shared % experts.intermediate:
            raise CheckpointError(
                f"shape.intermediate {shared} is no multiple of an expert's width, {experts.intermediate}"
            )
        content |= {
            "intermediate_size": shared or experts.intermediate,
            "moe_intermediate_size": experts.intermediate,
            "n_routed_experts": experts.num_experts,
            "n_shared_experts": shared // experts.intermediate,
            "num_experts_per_tok": experts.num_active,
            "n_group": experts.num_groups,
            "topk_group": experts.num_active_groups,
            "norm_topk_prob": experts.normalizes,
            "routed_scaling_factor": experts.scale,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "first_k_dense_replace": 0,
            "moe_layer_freq": 1,
        }
    return content
