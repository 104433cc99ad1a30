"""The differentiable forward is that of teacher and transformers, padding or not; a tuned one is what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.contract.errors import TrainingDataError
from paceline.methods.medusa2.tuned_backbone import LoraSettings, TunedBackbone
from paceline.models import model_fingerprint, tokenizer_fingerprint
from paceline.models.fetch import PROVENANCE_FILE
from paceline.target import SequenceRows, TapSpec, TargetEngine
from paceline.training.backbone import Backbone
from paceline.training.target_weights import read_weights
from paceline.training.teacher import Teacher


def _tokens(rows: int, length: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 200, (rows, length), generator=torch.Generator().manual_seed(seed))


def test_forward_equals_the_teachers_logits(target_dir: Path) -> None:
    teacher, weights = Teacher(target_dir, torch.float32), read_weights(target_dir)
    tokens = _tokens(3, 40, seed=1)
    padded = torch.nn.functional.pad(tokens, (0, 9))
    with torch.no_grad():
        expected, _ = teacher.forward(tokens, teacher.new_cache(3, 40))
        hidden = Backbone.llama(teacher.shape).final_hidden(
            weights, weights["model.embed_tokens.weight"], padded
        )
        logits, wanted = (teacher.logits(x[:, :40].flatten(0, 1)) for x in (hidden, expected))
    torch.testing.assert_close(logits, wanted, atol=2e-4, rtol=1e-4)


def family(name: str) -> dict[str, Any]:
    """A random model's configuration; what is particular to its family is not left at what does nothing."""
    common: dict[str, Any] = {
        "vocab_size": 120, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
        "initializer_range": 0.15, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    gemma = {"query_pre_attn_scalar": 9, "sliding_window": 9}
    kinds = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    own: dict[str, dict[str, Any]] = {
        "llama": {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}},
        "mistral": {"sliding_window": 9},
        "qwen2": {},
        "qwen3": {},
        "gemma3_text": {**gemma, **kinds},
    }
    return {"model_type": name, **common, **own[name]}


def save_random(config: dict[str, Any], path: Path) -> Path:
    """All parameters random, norms and biases too."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.2)
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"])
def test_the_forward_of_every_family_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    model_dir = save_random(family(name), tmp_path)
    backbone = Backbone.from_config(json.loads((model_dir / "config.json").read_text()))
    weights = read_weights(model_dir)
    tokens = _tokens(2, 30, seed=7) % 120
    with torch.no_grad():
        hidden = backbone.final_hidden(weights, weights["model.embed_tokens.weight"], tokens)
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        expected = model(tokens, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(hidden, expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gpt2"}, "learn from features alone ask for less: `paceline data continue`"),
        ({"model_type": "no-such-model"}, "'no-such-model' is not known"),
        ({"model_type": "gemma2"}, "soft caps"),
        ({}, "model_type None"),
        ({"model_type": "llama", "hidden_size": 10, "num_attention_heads": 3}, "'llama'.*not a multiple"),
        ({"model_type": "llama", "num_hidden_layers": "four"}, "'llama'.*expected int"),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "yarn"}}, "'llama'.*factor"),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "lineer"}}, "'lineer'.*none of default, "),
        ({"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "sequence length"),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"rope_theta": 5.0, "full_attention": {}}},
            "rope type None",
        ),
    ],
)
def test_what_is_not_computed_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingDataError, match=message):
        Backbone.from_config(config)


def test_norms_stored_less_one_keep_their_small_weights_in_bfloat16(tmp_path: Path) -> None:
    model_dir = save_random(family("gemma3_text"), tmp_path)
    random = torch.Generator().manual_seed(8)
    weights = {  # matrices that bfloat16 holds, so that norms alone are rounded, and norms that multiply by little
        k: torch.randn(w.shape, generator=random) * 0.005 - 0.985 if w.ndim == 1 else w.bfloat16().float()
        for k, w in read_weights(model_dir).items()
    }
    save_file(weights, model_dir / "model.safetensors", metadata={"format": "pt"})
    tokens = _tokens(1, 40, seed=9) % 120

    def engine(dtype: torch.dtype) -> torch.Tensor:
        loaded = TargetEngine.load(model_dir, dtype=dtype, taps=[TapSpec(norm_final=True)], executor="lean")
        step = loaded.step([SequenceRows(loaded.open(), tokens[0].tolist(), num_logits="none")])
        return step.features[0].float()

    exact = engine(torch.float32)
    backbone = TunedBackbone(model_dir, LoraSettings(dropout=0.0), 1, torch.bfloat16)
    with torch.no_grad():
        trained = backbone.hidden(tokens, is_training=False)[0].float()
    off = float((trained - exact).norm() / exact.norm())
    served = float((engine(torch.bfloat16) - exact).norm() / exact.norm())
    assert off < 1.3 * served, (off, served)


def test_gradients_reach_every_update(target_dir: Path) -> None:
    backbone = TunedBackbone(target_dir, LoraSettings(rank=4, dropout=0.0), 1, torch.float32)
    backbone.hidden(_tokens(2, 12, seed=2), is_training=True).square().sum().backward()
    assert len(backbone.parameters) == 4 * 7 * 2
    for name, parameter in backbone.parameters.items():
        assert parameter.grad is not None, name
        # `a` moves once `b` has: their product is zero at the start.
        assert bool(parameter.grad.any()) is name.endswith("lora_b"), name


def test_without_updates_it_is_the_target_and_keeps_its_fingerprint(target_dir: Path, tmp_path: Path) -> None:
    backbone = TunedBackbone(target_dir, LoraSettings(rank=4), 1, torch.float32)
    backbone.write(tmp_path / "tuned")
    assert model_fingerprint(tmp_path / "tuned") == model_fingerprint(target_dir)


@pytest.mark.parametrize("is_there", [False, True])
def test_the_written_target_computes_what_was_trained(
    is_there: bool, target_dir: Path, tmp_path: Path
) -> None:
    backbone = TunedBackbone(target_dir, LoraSettings(rank=4, alpha=8.0), 1, torch.float32)
    random = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for name, parameter in backbone.parameters.items():
            if name.endswith("lora_b"):
                parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.05)
    (target_dir / PROVENANCE_FILE).write_text("{}")
    tuned = tmp_path / "tuned"
    if is_there:
        tuned.mkdir()
        (tuned / "left-over").write_text("")
    backbone.write(tuned)
    assert not (tuned / "left-over").exists()
    assert {path.name for path in target_dir.iterdir()} - {path.name for path in tuned.iterdir()} == {
        PROVENANCE_FILE
    }
    assert model_fingerprint(tuned) != model_fingerprint(target_dir)
    assert tokenizer_fingerprint(tuned) == tokenizer_fingerprint(target_dir)
    tokens = _tokens(1, 30, seed=3)
    engine = TargetEngine.load(tuned, dtype=torch.float32, taps=[TapSpec(norm_final=True)])
    step = engine.step([SequenceRows(engine.open(), tokens[0].tolist(), num_logits="none")])
    with torch.no_grad():
        expected = backbone.hidden(tokens, is_training=False)[0]
        before = TunedBackbone(target_dir, LoraSettings(), 1, torch.float32).hidden(tokens, is_training=False)
    torch.testing.assert_close(step.features[0], expected, atol=2e-4, rtol=1e-3)
    assert float((before[0] - expected).abs().max()) > 0.05
