"""Modules in their targets' layout: in and out unchanged, and what they compute is what transformers' layers do."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.checkpoints.exchange import export_checkpoint, import_checkpoint, read_public
from paceline.methods.checkpoint import CheckpointError, DrafterConfig, read_all_tensors, save_drafter
from paceline.methods.deepseek_mtp.nextn import write_nextn
from paceline.methods.deepseek_mtp.objective import MtpShape
from paceline.methods.drafter import DraftRequest
from paceline.methods.layouts.target_facts import TargetFacts
from paceline.methods.loading import load_drafter
from paceline.models import model_fingerprint
from tests.methods.mtp_reference import ReferenceMtp

VOCAB, WIDTH, LAYERS = 61, 48, 3
SHAPE = MtpShape(
    hidden=WIDTH, num_heads=4, num_kv_heads=2, head_dim=12, intermediate=64, target_vocab=VOCAB, target_layers=LAYERS,
    rope_theta=900.0, rms_eps=1e-5, num_modules=2, carries_norm=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target with a head of its own."""
    path = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def modules(shape: MtpShape, seed: int = 1) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        name: 1.0 + 0.2 * torch.randn(size, generator=random)
        if len(size) == 1
        else torch.randn(size, generator=random) * 1.5 * size[1] ** -0.5
        for name, size in shape.parameter_shapes().items()
    }


def public_config(shape: MtpShape, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.target_vocab,
        "num_hidden_layers": LAYERS,
        "num_nextn_predict_layers": shape.num_modules,
        "max_position_embeddings": 128,
        "rms_norm_eps": shape.rms_eps,
        "rope_theta": shape.rope_theta,
        **changes,
    }


def publish(path: Path, target_dir: Path, tensors: dict[str, Tensor], **changes: Any) -> Path:
    """The modules in one file with the whole model, as such models are published."""
    model = load_file(target_dir / "model.safetensors")
    for name, tensor in tensors.items():
        _, index, rest = name.split(".", 2)
        model[f"model.layers.{LAYERS + int(index)}.{rest}"] = tensor
    for index in range(SHAPE.num_modules):
        model[f"model.layers.{LAYERS + index}.embed_tokens.weight"] = model[
            "model.embed_tokens.weight"
        ].clone()
        model[f"model.layers.{LAYERS + index}.shared_head.head.weight"] = model["lm_head.weight"].clone()
    path.mkdir(parents=True, exist_ok=True)
    save_file(model, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(public_config(SHAPE, **changes)))
    return path


def drafted(
    directory: Path, target_dir: Path, tokens: list[int], features: Tensor
) -> tuple[list[int], list[float]]:
    drafter = load_drafter(directory, target_dir, dtype=torch.float32)
    drafter.open(1, tokens)
    drafter.feed(1, 0, features[:-1])
    (entry,) = drafter.draft([DraftRequest(1, 5)])
    assert entry is not None
    return list(entry.tokens), list(entry.log_probs)


@pytest.mark.parametrize(("model_type", "carries_norm"), [("deepseek_v3", False), ("glm4_moe", True)])
def test_what_was_published_drafts_as_transformers_layers_do(
    target_dir: Path, tmp_path: Path, model_type: str, carries_norm: bool
) -> None:
    tensors = modules(SHAPE)
    config = import_checkpoint(
        publish(tmp_path / "public", target_dir, tensors, model_type=model_type), target_dir, tmp_path / "own"
    )
    assert config.method == "deepseek_mtp"
    assert (config.flag("carries_norm"), config.size("num_modules")) == (carries_norm, 2)
    tokens, features = list(range(5, 14)), torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(2))
    found, log_probs = drafted(tmp_path / "own", target_dir, tokens, features)
    model = load_file(target_dir / "model.safetensors")
    reference = ReferenceMtp(
        replace(SHAPE, carries_norm=carries_norm),
        tensors,
        model["model.embed_tokens.weight"],
        model["lm_head.weight"],
    )
    logits = reference.logits(features, tokens, found[:-1])
    assert logits.argmax(-1).tolist() == found
    expected = logits.log_softmax(-1)[range(5), found]
    torch.testing.assert_close(torch.tensor(log_probs), expected, rtol=1e-4, atol=1e-4)


def test_mimo_s_names_and_order_give_the_same_drafter(target_dir: Path, tmp_path: Path) -> None:
    shape = replace(SHAPE, num_modules=1)
    tensors, words = modules(shape), {
        "enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj",
        "shared_head.norm": "final_layernorm",
    }  # fmt: skip
    public = {}
    for name, tensor in tensors.items():
        rest = name.removeprefix("layers.0.")
        stem = rest.removesuffix(".weight")
        if stem == "eh_proj":
            tensor = torch.cat([tensor[:, WIDTH:], tensor[:, :WIDTH]], dim=1)
        public[f"model.mtp_layers.0.{words.get(stem, stem)}.weight"] = tensor.contiguous()
    save_file(public, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(public_config(shape, model_type="mimo")))
    config, read = read_public(tmp_path, TargetFacts.read(target_dir), "nextn")
    assert config.flag("carries_norm")
    assert set(read) == set(tensors)
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("with_target", [False, True])
@pytest.mark.parametrize("carries_norm", [False, True])
def test_out_and_in_again_is_the_same(
    target_dir: Path, tmp_path: Path, with_target: bool, carries_norm: bool
) -> None:
    shape = replace(SHAPE, carries_norm=carries_norm)
    content = {**asdict(shape), "max_positions": 128}
    config = DrafterConfig("deepseek_mtp", model_fingerprint(target_dir), target_dir.name, content)
    save_drafter(tmp_path / "own", config, modules(shape))
    export_checkpoint(tmp_path / "own", "nextn", tmp_path / "public", target_dir if with_target else None)
    names = set(load_file(tmp_path / "public" / "model.safetensors"))
    assert f"model.layers.{LAYERS + 1}.shared_head.norm.weight" in names
    assert (f"model.layers.{LAYERS}.embed_tokens.weight" in names) == with_target
    again = import_checkpoint(tmp_path / "public", target_dir, tmp_path / "again")
    first, second = read_all_tensors(tmp_path / "own"), read_all_tensors(tmp_path / "again")
    assert set(first) == set(second)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert (again.flag("carries_norm"), again.size("target_layers")) == (carries_norm, LAYERS)


def test_what_cannot_be_served_is_named(target_dir: Path, tmp_path: Path) -> None:
    facts, tensors = TargetFacts.read(target_dir), modules(SHAPE)
    name = "layers.1.hnorm.weight"
    for changed, words in (
        ({k: v for k, v in tensors.items() if k != name}, r"layers\.1\.hnorm\.weight is missing"),
        ({**tensors, "layers.0.extra.weight": torch.ones(2)}, r"layers\.0\.extra\.weight is surplus"),
        ({**tensors, name: torch.ones(3)}, r"hnorm\.weight has shape \(3,\)"),
        (
            {**tensors, "layers.0.self_attn.q_a_proj.weight": torch.ones(2)},
            r"q_a_proj\.weight is surplus",
        ),
        (
            {**tensors, "layers.0.mlp.experts.0.up_proj.weight": torch.ones(2)},
            r"experts\.0\.up_proj\.weight is surplus",
        ),
    ):
        with pytest.raises(CheckpointError, match=words):
            read_public(publish(tmp_path, target_dir, changed), facts, "nextn")
    for changes, words in (
        ({"num_nextn_predict_layers": 3}, r"model\.layers\.5\."),
        ({"num_nextn_predict_layers": 0}, "num_nextn_predict_layers"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"vocab_size": VOCAB + 1}, "61"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ):
        with pytest.raises(CheckpointError, match=words):
            read_public(publish(tmp_path, target_dir, tensors, **changes), facts, "nextn")
    shape = {**asdict(SHAPE), "max_positions": 128}
    for config, words in (
        (DrafterConfig("eagle1", "f", shape=shape), "eagle1"),
        (DrafterConfig("deepseek_mtp", "f", shape={**shape, "reads_residual": True}), "reads_residual"),
        (DrafterConfig("deepseek_mtp", "f", shape={**shape, "num_modules": 1}), "surplus"),
    ):
        with pytest.raises(CheckpointError, match=words):
            write_nextn(tmp_path / "out", config, tensors)
