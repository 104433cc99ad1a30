"""EAGLE's public layout: a class written after the published tensor names gives the same logits, both ways."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.checkpoints.exchange import read_public
from paceline.draft_layer import Rows
from paceline.methods.autoregressive.drafter import AutoregressiveDrafter
from paceline.methods.checkpoint import CheckpointError, save_drafter
from paceline.methods.eagle.layout import write_eagle
from paceline.methods.layouts.target_facts import TargetFacts
from paceline.methods.loading import load_drafter
from tests.methods.eagle_reference import ReferenceEagle1, ReferenceEagle3, chain_logits

VOCAB, WIDTH, PREFIX, CHAIN = 61, 48, 9, 3
TAPS = (2, 2, 1)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 900.0, "factor": 4.0, "original_max_position_embeddings": 32}

SIZES: dict[str, dict[str, Any]] = {
    "one key head a head": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "fewer key heads": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "one key head": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "wide heads": {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 20},
    "llama3 positions": {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": LLAMA3},
    "yarn positions": {"num_attention_heads": 2, "num_key_value_heads": 2, "rope_parameters": YARN},
    "linear positions": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    },
    "small base": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 77.0},
    },
}


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target with a head of its own."""
    path = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def facts(target_dir: Path) -> TargetFacts:
    return TargetFacts.read(target_dir)


def llama_config(name: str) -> LlamaConfig:
    return LlamaConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": WIDTH,
            "intermediate_size": 80,
            "num_hidden_layers": 1,
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-5,
            **SIZES[name],
        }
    )


def public_config(name: str, **changes: Any) -> dict[str, Any]:
    """As the published files are: flat, scaling apart from its base, and no more fields than needed."""
    sizes = {"rms_norm_eps": 1e-5, **SIZES[name], **changes}
    rope = dict(sizes.pop("rope_parameters", {"rope_type": "default", "rope_theta": 10000.0}))
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    if theta != 10000.0:
        sizes["rope_theta"] = theta
    if sizes["num_key_value_heads"] == sizes["num_attention_heads"]:
        del sizes["num_key_value_heads"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": WIDTH,
        "intermediate_size": 80,
        "num_hidden_layers": 1,
        "max_position_embeddings": 128,
        "vocab_size": VOCAB,
        "rope_scaling": None if kind == "default" else {"type": kind, **rope},
        **sizes,
    }


def shake(model: nn.Module, seed: int) -> None:
    """Norm weights and biases that are neither one nor zero."""
    random = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        scale = 0.3 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
        with torch.no_grad():
            values = torch.randn(parameter.shape, generator=random) * scale
            parameter.copy_(values + 1.0 if parameter.ndim == 1 else values)


def save(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({k: v.clone().contiguous() for k, v in tensors.items()}, directory / "model.safetensors")


def served_logits(
    directory: Path, target_dir: Path, features: Tensor, tokens: list[int], drafted: list[int]
) -> Tensor:
    """What the layer that serves computes, its prefix in one pass, then row by row: `[drafted + 1, draft_vocab]`."""
    drafter = load_drafter(directory, target_dir, dtype=torch.float32)
    assert isinstance(drafter, AutoregressiveDrafter)
    layer, cache = drafter._layer, drafter._cache
    with torch.inference_mode():
        slot = cache.get(cache.open(64))
        n = len(tokens) - 1
        output = layer.forward([Rows(slot, tokens[1:], features, range(n))], [n - 1])
        slot.length, slot.num_pending = n, 0
        logits = [output.logits[0]]
        for place, token in enumerate(drafted):
            output = layer.forward([Rows(slot, [token], output.states[-1:], [n + place])], [0])
            logits.append(output.logits[0])
    return torch.stack(logits)


def drawn(seed: int, count: int) -> tuple[list[int], list[int], Tensor]:
    """Committed tokens, drafted tokens, and what stands for features."""
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (PREFIX + CHAIN,), generator=random).tolist()
    return tokens[:PREFIX], tokens[PREFIX:], torch.randn(PREFIX - 1, count, generator=random)


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("name", SIZES)
def test_eagle1_gives_the_logits_of_the_published_layer(
    name: str, has_bias: bool, target_dir: Path, facts: TargetFacts, tmp_path: Path
) -> None:
    model = ReferenceEagle1(llama_config(name), has_bias)
    shake(model, seed=3)
    target = load_file(target_dir / "model.safetensors")
    model.embed_tokens.weight.data = target["model.embed_tokens.weight"]
    state = model.state_dict()
    stored = {
        k: v for k, v in state.items() if has_bias or k != "embed_tokens.weight"
    }  # it may be there or not
    extra = {} if has_bias else {"bias": False}
    save(tmp_path / "public", public_config(name, **extra), stored)
    config, tensors = read_public(tmp_path / "public", facts, "eagle")
    assert config.method == "eagle1"
    assert config.target_fingerprint == facts.fingerprint
    save_drafter(tmp_path / "ours", config, tensors)
    tokens, drafted, features = drawn(1, WIDTH)
    head = nn.Linear(WIDTH, VOCAB, bias=False)
    head.weight.data = target["lm_head.weight"]
    expected = chain_logits(model, head, features, tokens, drafted)
    found = served_logits(tmp_path / "ours", target_dir, features, tokens, drafted)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert float(expected.std()) > 0.5

    write_eagle(tmp_path / "back", config, tensors)
    again = ReferenceEagle1(llama_config(name), has_bias)
    written = load_file(tmp_path / "back" / "model.safetensors")
    missing = again.load_state_dict(written, strict=False)
    assert (missing.missing_keys, missing.unexpected_keys) == (["embed_tokens.weight"], [])
    assert all(torch.equal(written[k], state[k]) for k in written)
    assert read_public(tmp_path / "back", facts, "eagle")[0] == config


@pytest.mark.parametrize("draft_vocab", [VOCAB, 40])
@pytest.mark.parametrize("name", SIZES)
def test_eagle3_gives_the_logits_of_the_published_layer(
    name: str, draft_vocab: int, target_dir: Path, facts: TargetFacts, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    model = ReferenceEagle3(llama_config(name), draft_vocab)
    shake(model, seed=4)
    target = load_file(target_dir / "model.safetensors")
    model.embed_tokens.weight.data = target["model.embed_tokens.weight"]
    state = model.state_dict()
    if draft_vocab == VOCAB:
        del state["d2t"], state["t2d"]
    save(tmp_path / "public", public_config(name, draft_vocab_size=draft_vocab), state)
    config, tensors = read_public(tmp_path / "public", facts, "eagle")
    assert config.method == "eagle3"
    assert config.shape["tap_layers"] == list(TAPS)
    save_drafter(tmp_path / "ours", config, tensors)
    tokens, drafted, features = drawn(2, 3 * WIDTH)
    fused = features @ state["fc.weight"].T  # the target's side does this
    expected = chain_logits(model, nn.Sequential(model.norm, model.lm_head), fused, tokens, drafted)
    found = served_logits(tmp_path / "ours", target_dir, fused, tokens, drafted)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    drafter = load_drafter(tmp_path / "ours", target_dir, dtype=torch.float32)
    assert drafter.tap is not None
    assert drafter.tap.projection is not None
    assert torch.equal(drafter.tap.projection, state["fc.weight"])

    write_eagle(tmp_path / "back", config, tensors)
    written = load_file(tmp_path / "back" / "model.safetensors")
    assert set(written) == set(state) - {"embed_tokens.weight"}
    assert all(torch.equal(written[k], state[k]) for k in written)
    assert read_public(tmp_path / "back", facts, "eagle")[0] == config


def test_attention_with_biases_is_read_and_written(
    target_dir: Path, facts: TargetFacts, tmp_path: Path
) -> None:
    config = llama_config("fewer key heads")
    config.attention_bias = (
        True  # transformers gives the output a bias too, which the published layer has not
    )
    model = ReferenceEagle1(config)
    model.layers[0].self_attn.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)
    shake(model, seed=5)
    target = load_file(target_dir / "model.safetensors")
    model.embed_tokens.weight.data = target["model.embed_tokens.weight"]
    save(tmp_path / "public", public_config("fewer key heads", qkv_bias=True), model.state_dict())
    read, tensors = read_public(tmp_path / "public", facts, "eagle")
    save_drafter(tmp_path / "ours", read, tensors)
    tokens, drafted, features = drawn(3, WIDTH)
    head = nn.Linear(WIDTH, VOCAB, bias=False)
    head.weight.data = target["lm_head.weight"]
    expected = chain_logits(model, head, features, tokens, drafted)
    found = served_logits(tmp_path / "ours", target_dir, features, tokens, drafted)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    write_eagle(tmp_path / "back", read, tensors)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["qkv_bias"] is True


@pytest.fixture
def public(tmp_path: Path) -> tuple[Path, dict[str, Any], dict[str, Tensor]]:
    model = ReferenceEagle1(llama_config("fewer key heads"))
    config, tensors = public_config("fewer key heads"), dict(model.state_dict())
    save(tmp_path / "public", config, tensors)
    return tmp_path / "public", config, tensors


def test_what_is_missing_surplus_or_of_another_shape_is_named(
    public: tuple[Path, dict[str, Any], dict[str, Tensor]], facts: TargetFacts
) -> None:
    directory, config, tensors = public
    wrong = dict(tensors)
    del wrong["layers.0.mlp.up_proj.weight"]
    wrong["layers.0.input_layernorm.weight"] = torch.ones(WIDTH)
    wrong["fc.weight"] = wrong["fc.weight"][:, :-1]
    save(directory, config, wrong)
    with pytest.raises(CheckpointError) as caught:
        read_public(directory, facts, "eagle")
    message = str(caught.value)
    assert "layers.0.mlp.up_proj.weight is missing" in message
    assert "layers.0.input_layernorm.weight is surplus" in message
    assert "fc.weight has shape (48, 95), not (48, 96)" in message
    save(directory, {**config, "bias": False}, tensors)
    with pytest.raises(CheckpointError, match=r"fc\.bias is surplus"):
        read_public(directory, facts, "eagle")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"hidden_size": None}, "hidden_size"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type"),
        ({"rope_scaling": 3}, "rope_scaling"),
        ({"vocab_size": VOCAB + 1}, "target of 62 tokens"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
    ],
)
def test_configurations_that_are_not_supported_are_refused(
    changes: dict[str, Any],
    words: str,
    public: tuple[Path, dict[str, Any], dict[str, Tensor]],
    facts: TargetFacts,
) -> None:
    directory, config, tensors = public
    save(directory, {**config, **changes}, tensors)
    with pytest.raises(CheckpointError, match=words):
        read_public(directory, facts, "eagle")


def test_pickles_and_other_files_are_refused(
    public: tuple[Path, dict[str, Any], dict[str, Tensor]], facts: TargetFacts, tmp_path: Path
) -> None:
    directory, config, _ = public
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle.*Convert"):
        read_public(directory, facts, "eagle")
    (directory / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match="no safetensors"):
        read_public(directory, facts, "eagle")
    save(directory, config, {"heads.0.weight": torch.ones(1)})
    with pytest.raises(CheckpointError, match="EAGLE-1"):
        read_public(directory, facts, "eagle")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_public(tmp_path / "nothing", facts, "eagle")


def test_only_what_the_layout_holds_is_written(
    public: tuple[Path, dict[str, Any], dict[str, Tensor]], facts: TargetFacts, tmp_path: Path
) -> None:
    config, tensors = read_public(public[0], facts, "eagle")
    with pytest.raises(CheckpointError, match="'medusa1'"):
        write_eagle(tmp_path / "out", replace(config, method="medusa1"), tensors)
    with pytest.raises(CheckpointError, match=r"fc\.bias is missing; more is surplus"):
        write_eagle(
            tmp_path / "out",
            config,
            {k: v for k, v in tensors.items() if k != "fc.bias"} | {"more": torch.ones(1)},
        )
    assert not (tmp_path / "out").exists()
    write_eagle(tmp_path / "out", replace(config, method="eagle2"), tensors)
    assert read_public(tmp_path / "out", facts, "eagle")[0] == config
