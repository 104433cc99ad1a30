"""A module like DeepSeek-V3's own layers: trained, resumed, exported and imported, and what it computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from paceline.checkpoints.exchange import export_checkpoint, import_checkpoint
from paceline.contract.errors import TrainingDataError
from paceline.methods.checkpoint import DrafterConfig, read_all_tensors
from paceline.methods.deepseek_mtp.objective import DeepseekMtpObjective
from paceline.methods.deepseek_mtp.start import default_shape
from paceline.methods.drafter import DraftRequest
from paceline.methods.loading import load_drafter
from paceline.models import model_fingerprint
from paceline.training.configuration import read_config_json
from paceline.training.features import FeatureOptions
from paceline.training.features import run as add_features
from paceline.training.objective import TargetReference
from paceline.training.sizes import ModelSizes
from tests.methods.deepseek_reference import VARIANTS, DeepseekReference, public_module, save_target
from tests.training.conftest import continued, give_tokenizer
from tests.training.test_deepseek_mtp import random_batch
from tests.training.test_trainer import _acceptance, _newest, _options


@pytest.fixture(scope="module")
def deepseek_dir(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deepseek")
    vocab = ModelSizes.read(target_dir).vocab
    save_target(path, vocab_size=vocab, hidden_size=64, initializer_range=0.1, pad_token_id=0, eos_token_id=2)
    return give_tokenizer(path, target_dir)


@pytest.fixture(scope="module")
def text_dirs(deepseek_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Text to learn from and held-out text that the target wrote, with features."""
    folders = []
    for seed in (1, 2):
        folder = continued(deepseek_dir, tmp_path_factory.mktemp("deepseek-text"), seed)
        add_features(FeatureOptions(deepseek_dir, folder, dtype="float32", num_threads=1))
        folders.append(folder)
    return folders[0], folders[1]


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("carries_norm", [False, True])
def test_what_training_computes_is_what_transformers_layers_do(
    name: str, carries_norm: bool, tmp_path: Path
) -> None:
    changes = {
        k: v for k, v in VARIANTS[name].items() if k != "rope_parameters"
    }  # training has plain rotary positions
    config = save_target(tmp_path, vocab_size=53, **changes)
    module, tensors = public_module(config)
    shape = default_shape(ModelSizes.read(tmp_path), 1, read_config_json(tmp_path))
    shape = replace(shape, carries_norm=carries_norm)
    target = load_file(tmp_path / "model.safetensors")
    objective = DeepseekMtpObjective(
        shape,
        {f"layers.0.{key}": value for key, value in tensors.items()},
        target["model.embed_tokens.weight"],
        target["lm_head.weight"],
        TargetReference("f", "tiny", (), 64),
        dtype=torch.float32,
    )
    batch = random_batch()
    features = batch.need_hidden()
    tokens = batch.tokens[0].tolist()
    reference = DeepseekReference(config, [module], target, carries_norm)
    with torch.no_grad():
        found = (
            torch.stack([out[0] for out in objective.run(batch, features, 3)]) @ target["lm_head.weight"].T
        )
    for row in (0, 4, 9):
        wanted = reference.logits(features[0], tokens[: row + 2], tokens[row + 2 : row + 4])
        torch.testing.assert_close(found[:, row], wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("carries_norm", [False, True])
def test_modules_in_sequence_are_served_as_they_are_trained(carries_norm: bool, tmp_path: Path) -> None:
    config = save_target(tmp_path / "target", vocab_size=53)
    shape = default_shape(ModelSizes.read(tmp_path / "target"), 2, read_config_json(tmp_path / "target"))
    target = load_file(tmp_path / "target" / "model.safetensors")
    objective = DeepseekMtpObjective(
        replace(shape, carries_norm=carries_norm),
        {
            f"layers.{at}.{k}": v.bfloat16().float()
            for at in (0, 1)
            for k, v in public_module(config, at)[1].items()
        },
        target["model.embed_tokens.weight"],
        target["lm_head.weight"],
        TargetReference(model_fingerprint(tmp_path / "target"), "tiny", (), 64),
        dtype=torch.float32,
    )
    objective.export(tmp_path / "drafter", {})
    drafter = load_drafter(tmp_path / "drafter", tmp_path / "target", dtype=torch.float32)
    batch = random_batch()
    tokens, features = batch.tokens[0, :9].tolist(), batch.need_hidden()[:1, :9]
    drafter.open(1, tokens)
    drafter.feed(1, 0, features[0, :8])
    (entry,) = drafter.draft([DraftRequest(1, 5)])
    assert entry is not None
    whole = torch.tensor([[*tokens, *entry.tokens]])
    padded = F.pad(features, (0, 0, 0, 5))
    with torch.no_grad():
        outputs = torch.stack([out[0, 7] for out in objective.run(replace(batch, tokens=whole), padded, 5)])
        wanted = (outputs @ target["lm_head.weight"].T).log_softmax(-1)
    assert wanted.argmax(-1).tolist() == list(entry.tokens)
    torch.testing.assert_close(torch.tensor(entry.log_probs), wanted.amax(-1), rtol=1e-4, atol=1e-4)


def test_gradients_reach_gate_and_experts(tmp_path: Path) -> None:
    # All experts are active, so that no small step changes who is chosen.
    config = save_target(tmp_path, vocab_size=53, n_group=1, topk_group=1, num_experts_per_tok=8)
    _, tensors = public_module(config)
    shape = default_shape(ModelSizes.read(tmp_path), 1, read_config_json(tmp_path))
    target = load_file(tmp_path / "model.safetensors")
    objective = DeepseekMtpObjective(
        shape,
        {f"layers.0.{key}": value for key, value in tensors.items()},
        target["model.embed_tokens.weight"],
        target["lm_head.weight"],
        TargetReference("f", "tiny", (), 64),
        dtype=torch.float32,
    )
    loss, _ = objective.loss(random_batch())
    loss.backward()
    parameters = objective.named_parameters()
    reached = {name for name, p in parameters.items() if p.grad is not None and bool(p.grad.any())}
    assert set(parameters) - reached == {"layers.0.mlp.gate.e_score_correction_bias"}
    name = "layers.0.mlp.gate.weight"
    direction = torch.randn(parameters[name].shape, generator=torch.Generator().manual_seed(1))
    values = []
    for step in (1e-3, -1e-3):
        with torch.no_grad():
            parameters[name] += step * direction
        values.append(float(objective.loss(random_batch())[0].detach()))
        with torch.no_grad():
            parameters[name] -= step * direction
    grad = parameters[name].grad
    assert grad is not None
    assert (values[0] - values[1]) / 2e-3 == pytest.approx(float((grad * direction).sum()), rel=5e-2)


def test_a_module_is_trained_resumed_exported_and_imported(
    deepseek_dir: Path, text_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    changes: dict[str, object] = {
        "method": "deepseek_mtp", "num_modules": 1, "num_steps": 24, "eval_every": 24, "checkpoint_every": 12,
        "learning_rate": 5e-3, "optimizer": "muon",
    }  # fmt: skip
    run = _options(deepseek_dir, *text_dirs, tmp_path / "whole", **changes)
    untrained = _acceptance(run, None)
    assert run.train().best_mean_accepted > untrained
    parts = _options(deepseek_dir, *text_dirs, tmp_path / "parts", **changes)
    assert parts.train(stop_after=12).step == 12
    parts.train()
    first, second = _newest(run.run_dir), _newest(parts.run_dir)
    assert all(torch.equal(first[k], second[k]) for k in first)

    shape = DrafterConfig.read(run.export_dir).shape
    assert shape["latent"]["kv_rank"] == 16
    assert shape["experts"]["num_experts"] == 8
    export_checkpoint(run.export_dir, "nextn", tmp_path / "public")
    again = import_checkpoint(tmp_path / "public", deepseek_dir, tmp_path / "again")
    assert (again.shape["latent"], again.shape["experts"]) == (shape["latent"], shape["experts"])
    ours, theirs = read_all_tensors(run.export_dir), read_all_tensors(tmp_path / "again")
    assert {name for name in ours if name != "token_map"} == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    drafts = []
    for folder in (run.export_dir, tmp_path / "again"):
        drafter = load_drafter(folder, deepseek_dir, dtype=torch.float32)
        drafter.open(1, list(range(5, 12)))
        drafter.feed(1, 0, torch.randn(6, 64, generator=torch.Generator().manual_seed(1)))
        (entry,) = drafter.draft([DraftRequest(1, 6)])
        assert entry is not None
        drafts.append(entry.tokens)
    assert len(drafts[0]) == 6


def test_a_target_whose_block_no_module_has_is_refused(tmp_path: Path) -> None:
    save_target(tmp_path, attention_bias=True)
    with pytest.raises(TrainingDataError, match="attention_bias"):
        default_shape(ModelSizes.read(tmp_path), 1, read_config_json(tmp_path))
