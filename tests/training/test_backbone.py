"""The differentiable forward equals the teacher's, padding or not, and a tuned backbone equals what it writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.models import model_fingerprint, tokenizer_fingerprint
from paceline.models.fetch import PROVENANCE_FILE
from paceline.target import SequenceRows, TapSpec, TargetEngine
from paceline.training.backbone import final_hidden
from paceline.training.teacher import Teacher
from paceline.training.tuned_backbone import LoraSettings, TunedBackbone


def _tokens(rows: int, length: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 200, (rows, length), generator=torch.Generator().manual_seed(seed))


def test_forward_equals_the_teachers_logits(target_dir: Path) -> None:
    from paceline.training.teacher import read_weights

    teacher, weights = Teacher.load(target_dir, torch.float32), read_weights(target_dir)
    tokens = _tokens(3, 40, seed=1)
    padded = torch.nn.functional.pad(tokens, (0, 9))
    with torch.no_grad():
        expected, _ = teacher.forward(tokens, teacher.new_cache(3, 40))
        hidden = final_hidden(weights, teacher.shape, weights["model.embed_tokens.weight"], padded)
        logits, wanted = (teacher.logits(x[:, :40].flatten(0, 1)) for x in (hidden, expected))
    torch.testing.assert_close(logits, wanted, atol=2e-4, rtol=1e-4)


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
