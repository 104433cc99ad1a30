"""Features beside text that was written without them: the target's own, and enough to train drafters for any target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.contract.errors import TrainingDataError
from paceline.methods.drafter import DraftRequest
from paceline.methods.loading import drafter_tap, load_drafter
from paceline.target import SequenceRows, TargetEngine
from paceline.training import shards
from paceline.training.features import FeatureOptions, run
from paceline.training.sizes import ModelSizes, default_tap_layers
from tests.training.conftest import continued
from tests.training.training_run import TrainingRun

METHODS = (
    *("deepseek_mtp", "dflash", "dspark", "eagle1", "eagle2", "eagle3", "medusa1", "p_eagle"),
    *(
        "independent",
        "medusa2",
        "pard1",
        "pard2",
    ),  # these train layers of the target itself, or a model cut from it
)
"""All but the one that was made for Gemma."""


def options(model_dir: Path, data_dir: Path) -> FeatureOptions:
    return FeatureOptions(model_dir, data_dir, batch_tokens=150, dtype="float32", num_threads=1)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_features_are_the_hidden_states_of_transformers(
    family: str, target_dir: Path, gemma3_dir: Path, tmp_path: Path
) -> None:
    model_dir = target_dir if family == "llama" else gemma3_dir
    folder = continued(model_dir, tmp_path / "text", seed=3)
    before = shards.read_shard(shards.shard_path(folder, 0))
    assert before.hidden is None
    assert run(options(model_dir, folder))["conversations"] == 8
    shard = shards.read_shard(shards.shard_path(folder, 0))
    assert shard.taps is not None
    assert shard.hidden is not None
    for name in ("tokens", "top_tokens", "segments", "offsets", "is_greedy"):
        assert torch.equal(getattr(shard, name), getattr(before, name)), name
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    layers = default_tap_layers(ModelSizes.read(model_dir).num_layers)
    for start, end in zip(shard.offsets[:-1].tolist(), shard.offsets[1:].tolist(), strict=True):
        with torch.inference_mode():
            states = model(
                shard.tokens[None, start : end - 1].long(), output_hidden_states=True
            ).hidden_states
        expected = torch.cat([states[layer][0] for layer in layers], dim=1)
        torch.testing.assert_close(shard.taps[start : end - 1].float(), expected, atol=0.05, rtol=0.02)
        torch.testing.assert_close(shard.hidden[start : end - 1].float(), states[-1][0], atol=0.05, rtol=0.02)
        assert not shard.hidden[end - 1].any()
        assert not shard.taps[end - 1].any()


def test_shards_that_have_features_are_kept(target_dir: Path, tmp_path: Path) -> None:
    folder = continued(target_dir, tmp_path / "text", seed=4)
    run(options(target_dir, folder))
    path = shards.shard_path(folder, 0)
    before = path.stat().st_mtime_ns
    continued(target_dir, folder, seed=4, num_shards=2)
    assert run(options(target_dir, folder))["shards"] == 2
    assert path.stat().st_mtime_ns == before
    assert shards.read_shard(shards.shard_path(folder, 1)).hidden is not None


def test_features_that_are_there_are_not_read_to_be_skipped(
    target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = continued(target_dir, tmp_path / "text", seed=4, num_shards=2)
    assert not shards.has_features(shards.shard_path(folder, 0))
    run(options(target_dir, folder))
    assert shards.has_features(shards.shard_path(folder, 0))
    with monkeypatch.context() as patched:
        patched.setattr(shards, "read_shard", lambda *_: pytest.fail("a shard was read"))
        assert run(options(target_dir, folder))["shards"] == 2
    shards.shard_path(folder, 1).write_bytes(b"half a sha")
    with pytest.raises(TrainingDataError, match="shard-00001"):
        run(options(target_dir, folder))


def test_text_of_another_target_is_refused(target_dir: Path, gemma3_dir: Path, tmp_path: Path) -> None:
    folder = continued(target_dir, tmp_path / "text", seed=5)
    with pytest.raises(TrainingDataError, match="another target"):
        run(options(gemma3_dir, folder))
    with pytest.raises(TrainingDataError, match="no shards"):
        run(options(target_dir, tmp_path))
    with pytest.raises(TrainingDataError, match="batch_tokens"):
        run(replace(options(target_dir, folder), batch_tokens=0))


@pytest.mark.parametrize("method", METHODS)
def test_a_drafter_is_trained_and_drafts_for_a_target_that_is_no_llama(
    method: str, gemma3_dir: Path, gemma3_text_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    data_dir, heldout_dir = gemma3_text_dirs
    result = TrainingRun(
        method, gemma3_dir, data_dir, heldout_dir, tmp_path / "run", tmp_path / "export", num_steps=3,
        batch_tokens=200, draft_vocab=64, num_layers=1, block_size=4, num_depths=3, num_heads=2, test_steps=2,
        markov_rank=8, num_anchors=4, lora_rank=4, max_loss_increase=9.0, eval_every=3, dtype="float32",
        num_threads=1,
    ).train()  # fmt: skip
    assert result.step == 3
    served = tmp_path / "export" / "target" if method == "medusa2" else gemma3_dir
    tap = drafter_tap(tmp_path / "export")
    engine = TargetEngine.load(served, dtype=torch.float32, taps=[] if tap is None else [tap])
    drafter = load_drafter(tmp_path / "export", served, dtype=torch.float32)
    text = [5, 9, 40, 77, 12]
    step = engine.step([SequenceRows(engine.open(16), text[:-1])])
    drafter.open(1, text)
    if tap is not None:
        drafter.feed(1, 0, step.features[0])
    (entry,) = drafter.draft([DraftRequest(1, num_tokens=2)])
    assert entry is not None
    assert entry.tokens
    assert all(0 <= token < 108 for token in entry.tokens)
