"""DeepSeek-V3's own modules: read as published, in 8 bits too, and they draft as transformers' layers do."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3ForCausalLM, Glm4MoeLiteConfig
from transformers.modeling_layers import MtpModel
from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteDecoderLayer

from paceline.checkpoints.exchange import export_checkpoint, import_checkpoint, read_public
from paceline.methods.checkpoint import CheckpointError, DrafterConfig, read_all_tensors
from paceline.methods.decoder_block import block_shape, block_shapes
from paceline.methods.deepseek_mtp.deepseek_block import read_latent, read_mlp, read_sizes
from paceline.methods.drafter import Drafter, DraftRequest
from paceline.methods.layouts.public_config import PublicConfig
from paceline.methods.layouts.target_facts import TargetFacts
from paceline.methods.loading import load_drafter
from tests.methods.deepseek_reference import (
    VARIANTS,
    YARN,
    DeepseekReference,
    decoder_layer,
    deepseek_config,
    public_config,
    public_module,
    publish,
    save_target,
)

TOKENS = [5, 17, 40, 3, 44, 9, 60, 28, 13, 51]


OTHER = TOKENS[3:7]


def start(directory: Path, target_dir: Path, features: Tensor) -> Drafter:
    drafter = load_drafter(directory, target_dir, dtype=torch.float32)
    drafter.open(1, TOKENS)
    drafter.feed(1, 0, features[:-1])
    return drafter


@pytest.mark.parametrize("name", VARIANTS)
def test_what_was_published_drafts_as_transformers_layers_do(tmp_path: Path, name: str) -> None:
    config = save_target(tmp_path / "target", **VARIANTS[name])
    module, tensors = public_module(config)
    public = publish(tmp_path / "public", tmp_path / "target", config, [tensors])
    own = import_checkpoint(public, tmp_path / "target", tmp_path / "own")
    features = torch.randn(len(TOKENS), config.hidden_size, generator=torch.Generator().manual_seed(2))
    drafter = start(tmp_path / "own", tmp_path / "target", features)
    drafter.open(2, OTHER)
    drafter.feed(2, 0, features[3:6])
    target = load_file(tmp_path / "target" / "model.safetensors")
    reference = DeepseekReference(config, [module], target, own.flag("carries_norm"))
    entries = drafter.draft([DraftRequest(2, 3), DraftRequest(1, 5)])
    for entry, text, read in zip(entries, (OTHER, TOKENS), (features[3:7], features), strict=True):
        assert entry is not None
        logits = reference.logits(read, text, entry.tokens[:-1])
        assert logits.argmax(-1).tolist() == list(entry.tokens)
        wanted = logits.log_softmax(-1)[range(len(entry.tokens)), list(entry.tokens)]
        torch.testing.assert_close(torch.tensor(entry.log_probs), wanted, rtol=1e-5, atol=1e-5)

    # Of the longer text three more tokens are committed, the last another than drafted: rows of true features follow.
    assert entry is not None
    more = [*TOKENS, entry.tokens[0], entry.tokens[1], (entry.tokens[2] + 1) % config.vocab_size]
    rows = torch.randn(3, config.hidden_size, generator=torch.Generator().manual_seed(3))
    drafter.extend(1, len(TOKENS), more[len(TOKENS) :])
    drafter.feed(1, len(TOKENS) - 1, torch.cat([features[-1:], rows[:2]]))
    (entry,) = drafter.draft([DraftRequest(1, 3)])
    assert entry is not None
    logits = reference.logits(torch.cat([features, rows]), more, entry.tokens[:-1])
    wanted = logits.log_softmax(-1)[range(3), list(entry.tokens)]
    torch.testing.assert_close(torch.tensor(entry.log_probs), wanted, rtol=1e-5, atol=1e-5)


def test_transformers_reads_the_same_module_from_the_same_directory(tmp_path: Path) -> None:
    config = save_target(tmp_path / "target")
    _, tensors = public_module(config)
    public = publish(tmp_path / "public", tmp_path / "target", config, [tensors])
    import_checkpoint(public, tmp_path / "target", tmp_path / "own")
    theirs = DeepseekV3ForCausalLM.from_pretrained(
        public, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    theirs._keys_to_ignore_on_load_unexpected = [
        r"model\.layers\.3\."
    ]  # transformers names the layer 61 alone
    mtp = MtpModel.from_pretrained(theirs).eval()
    ids = torch.tensor([TOKENS])
    with torch.no_grad():
        features = theirs.model(ids).last_hidden_state[0]
        at = torch.arange(len(TOKENS) - 1)[None]
        _, logits, _ = mtp(ids[:, 1:], features[None, :-1], None, at, None)
    drafter = start(tmp_path / "own", tmp_path / "target", features.clone())
    (entry,) = drafter.draft([DraftRequest(1, 1)])
    assert entry is not None
    wanted = logits.view(-1, config.vocab_size)[-1].log_softmax(-1)
    assert entry.tokens[0] == int(wanted.argmax())
    torch.testing.assert_close(entry.log_probs[0], float(wanted.max()), rtol=1e-5, atol=1e-5)


def in_8_bits(tensors: dict[str, Tensor], block: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors as DeepSeek stores them, and what they mean in bfloat16."""
    stored, meant = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if (not name.endswith("_proj.weight") and "kv_a_proj" not in name) or name == "eh_proj.weight":
            continue
        rows, columns = tensor.shape
        scale = torch.ones(-(-rows // block), -(-columns // block))
        wide = torch.ones(rows, columns)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                part = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
                scale[i, j] = tensor[part].abs().max() / 448.0
                wide[part] = scale[i, j]
        stored[name] = (tensor / wide).to(torch.float8_e4m3fn)
        stored[name + "_scale_inv"] = scale
        meant[name] = (stored[name].float() * wide).bfloat16()
    return stored, meant


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [20, 20]}


def test_block_scaled_weights_are_multiplied_out(tmp_path: Path) -> None:
    config = save_target(tmp_path / "target")
    facts = TargetFacts.read(tmp_path / "target")
    stored, meant = in_8_bits(public_module(config)[1], 20)
    public = publish(tmp_path / "public", tmp_path / "target", config, [stored], quantization_config=FP8)
    _, tensors = read_public(public, facts, "nextn")
    assert {name.removeprefix("layers.0.") for name in tensors} == set(meant)
    assert all(torch.equal(tensors["layers.0." + name], meant[name]) for name in meant)
    weight = "mlp.experts.3.up_proj.weight"
    for changed, quantization, words in (
        ({**stored, weight: meant[weight]}, FP8, "is not a float8 e4m3 matrix"),
        (
            {**stored, weight + "_scale_inv": torch.ones(1, 1)},
            FP8,
            r"_scale_inv has shape \(1, 1\), not \(2, 2\)",
        ),
        ({k: v for k, v in stored.items() if k != weight + "_scale_inv"}, FP8, "by which it is scaled"),
        (
            {k: v for k, v in stored.items() if k != weight},
            FP8,
            f"scales layers.0.{weight}, which is missing",
        ),
        (stored, ..., "no quantization_config"),
        (stored, {**FP8, "quant_method": "awq"}, "quant_method must be 'fp8'"),
        (stored, {**FP8, "weight_block_size": [20]}, "weight_block_size must be two"),
    ):
        bad = publish(
            tmp_path / "bad", tmp_path / "target", config, [changed], quantization_config=quantization
        )
        with pytest.raises(CheckpointError, match=words):
            read_public(bad, facts, "nextn")


@pytest.mark.parametrize("name", ["experts in groups", "no latent of queries", "yarn", "dense", "halves"])
def test_out_and_in_again_is_the_same(tmp_path: Path, name: str) -> None:
    config = save_target(tmp_path / "target", **VARIANTS[name])
    modules = [public_module(config, seed)[1] for seed in (0, 1)]
    first = import_checkpoint(
        publish(tmp_path / "public", tmp_path / "target", config, modules),
        tmp_path / "target",
        tmp_path / "own",
    )
    export_checkpoint(tmp_path / "own", "nextn", tmp_path / "out", tmp_path / "target")
    second = import_checkpoint(tmp_path / "out", tmp_path / "target", tmp_path / "again")
    assert first.shape == second.shape
    one, two = read_all_tensors(tmp_path / "own"), read_all_tensors(tmp_path / "again")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm_topk_prob": ...}, "norm_topk_prob must be given"),
        ({"scoring_func": "softmax"}, "scoring_func must be 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method must be 'noaux_tc'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq must be 1"),
        ({"index_topk": 2048}, "index_topk must be absent"),
        ({"attention_bias": True}, "attention_bias must be False"),
        ({"num_key_value_heads": 2}, "num_key_value_heads must be 4"),
        ({"kv_lora_rank": "16"}, "kv_lora_rank must be a positive whole number"),
        ({"qk_rope_head_dim": 7, "qk_nope_head_dim": 13}, "rope_dim must be even"),
        ({"kv_lora_rank": 17}, r"kv_a_layernorm.weight has shape \(16,\), not \(17,\)"),
        ({"n_group": 3}, "num_groups must divide num_experts"),
        ({"n_routed_experts": 12}, "mlp.experts.11.up_proj.weight is missing"),
        ({"n_routed_experts": 4, "n_group": 2}, "mlp.experts.7.up_proj.weight is surplus"),
        ({"first_k_dense_replace": 9}, "mlp.gate_proj.weight is missing"),
        ({"model_type": "longcat_flash"}, "model_type must be 'deepseek_v3' or"),
        ({"attention_gain": 2.0}, "no reader of this format knows attention_gain"),
        ({"rope_scaling": {"type": "yarn", "factor": None}}, "rope_scaling.factor must be a finite number"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "must be default or yarn"),
        ({"rope_scaling": {**YARN, "low_freq_factor": 1.0}}, "knows rope_scaling.low_freq_factor"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a finite number"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
    ],
)
def test_what_cannot_be_served_is_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    config = save_target(tmp_path / "target")
    public = publish(tmp_path / "public", tmp_path / "target", config, [public_module(config)[1]], **changes)
    with pytest.raises(CheckpointError, match=words):
        read_public(public, TargetFacts.read(tmp_path / "target"), "nextn")


@pytest.mark.parametrize("name", ["embed_tokens", "shared_head.head"])
def test_a_copy_that_differs_from_the_target_is_refused(tmp_path: Path, name: str) -> None:
    config = save_target(tmp_path / "target")
    module = public_module(config)[1]
    public = publish(tmp_path / "public", tmp_path / "target", config, [module])
    tensors = load_file(public / "model.safetensors")
    tensors[f"model.layers.3.{name}.weight"][5, 6] += 0.5
    save_file(tensors, public / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"layers\.0\.{name}\.weight is no copy of the target's"):
        read_public(public, TargetFacts.read(tmp_path / "target"), "nextn")


def test_a_configuration_as_transformers_saves_it_gives_the_same_shape(tmp_path: Path) -> None:
    config = save_target(tmp_path / "target", rope_parameters=YARN)
    module, facts = public_module(config)[1], TargetFacts.read(tmp_path / "target")
    public = publish(tmp_path / "public", tmp_path / "target", config, [module])
    first, _ = read_public(public, facts, "nextn")
    shutil.copy(tmp_path / "target" / "config.json", public)
    second, _ = read_public(public, facts, "nextn")
    assert first.shape == second.shape
    assert first.shape["rope_parameters"]["mscale_all_dim"] == YARN["mscale_all_dim"]


def test_a_module_that_sglang_exported_alone_is_the_same(tmp_path: Path) -> None:
    """SGLang's script renames the layer to 0, drops both copies and says `num_hidden_layers` 1."""
    config = save_target(tmp_path / "target")
    module, facts = public_module(config)[1], TargetFacts.read(tmp_path / "target")
    first, tensors = read_public(
        publish(tmp_path / "public", tmp_path / "target", config, [module]), facts, "nextn"
    )
    alone = tmp_path / "alone"
    alone.mkdir()
    renamed = {f"model.layers.0.{name}": tensor for name, tensor in module.items()}
    save_file(renamed, alone / "nextn_layer_parameters.safetensors")
    index = {"weight_map": dict.fromkeys(renamed, "nextn_layer_parameters.safetensors")}
    (alone / "model.safetensors.index.json").write_text(json.dumps(index))
    content = public_config(config) | {
        "num_hidden_layers": 1,
        "architectures": ["DeepseekV3ForCausalLMNextN"],
    }
    (alone / "config.json").write_text(json.dumps(content))
    second, same = read_public(alone, facts)
    assert first.shape == second.shape
    assert tensors.keys() == same.keys()
    assert all(torch.equal(tensors[name], same[name]) for name in tensors)


def test_glm_4_7_flash_has_the_same_block_and_hands_on_the_normed_state(tmp_path: Path) -> None:
    """The keys are those of transformers' `Glm4MoeLiteConfig`, and `first_k_dense_replace`, which engines read."""
    config = save_target(tmp_path / "target", n_group=1, topk_group=1)
    tensors = public_module(config)[1]
    content = {key: value for key, value in config.to_dict().items() if hasattr(Glm4MoeLiteConfig, key)}
    glm = Glm4MoeLiteConfig(**{**content, "model_type": "glm4_moe_lite"})
    layer = Glm4MoeLiteDecoderLayer(glm, 2).eval()
    own = decoder_layer(config)
    layer.load_state_dict(own.state_dict())
    module, _ = public_module(config)
    module.mtp_block = layer
    public = publish(tmp_path / "public", tmp_path / "target", config, [tensors])
    content = json.loads((public / "config.json").read_text())
    for key in ("aux_loss_alpha", "ep_size", "moe_layer_freq", "scoring_func", "seq_aux"):
        del content[key]
    content |= {
        "model_type": "glm4_moe_lite",
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "partial_rotary_factor": 1.0,
        "mlp_layer_types": glm.mlp_layer_types,
    }
    (public / "config.json").write_text(json.dumps(content))
    imported = import_checkpoint(public, tmp_path / "target", tmp_path / "own")
    assert imported.flag("carries_norm")
    features = torch.randn(len(TOKENS), config.hidden_size, generator=torch.Generator().manual_seed(2))
    (entry,) = start(tmp_path / "own", tmp_path / "target", features).draft([DraftRequest(1, 5)])
    assert entry is not None
    target = load_file(tmp_path / "target" / "model.safetensors")
    reference = DeepseekReference(config, [module], target, True)
    logits = reference.logits(features, TOKENS, entry.tokens[:-1])
    wanted = logits.log_softmax(-1)[range(5), list(entry.tokens)]
    torch.testing.assert_close(torch.tensor(entry.log_probs), wanted, rtol=1e-5, atol=1e-5)


BAD = (None, "7", -1, 0, 1 << 40, True, [3], {"a": 1}, 2.5, float("nan"))


@pytest.mark.parametrize("key", public_config(deepseek_config()))
def test_any_value_of_a_key_is_read_or_refused(key: str) -> None:
    """Of the keys that describe the block: nothing but a checkpoint's own error, and no memory for a large number."""
    for value in BAD:
        config = PublicConfig(public_config(deepseek_config()) | {key: value})
        with contextlib.suppress(CheckpointError):
            shape = read_sizes(config) | read_mlp(config, 3, 1) | read_latent(config)
            whole = DrafterConfig("deepseek_mtp", "", shape=shape)
            block_shapes(whole, "", 32)
            block_shape(whole)
