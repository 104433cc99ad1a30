"""Folders of which only some shards have features: what needs them says which lacks them, what does not goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from paceline.contract.errors import TrainingDataError
from paceline.training import shards
from paceline.training.data import Corpus
from paceline.training.features import FeatureOptions
from paceline.training.features import run as add_features
from tests.training.conftest import continued
from tests.training.training_run import TrainingRun


@pytest.fixture(scope="module")
def with_features(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards with features."""
    folder = continued(target_dir, tmp_path_factory.mktemp("whole"), seed=6, num_shards=2)
    add_features(FeatureOptions(target_dir, folder, dtype="float32", num_threads=1))
    return folder


@pytest.fixture(params=[0, 1])
def partly(
    request: pytest.FixtureRequest, target_dir: Path, with_features: Path, tmp_path: Path
) -> tuple[Path, Path]:
    """A folder with a shard that has no features, and that shard."""
    folder = tmp_path / "partly"
    shutil.copytree(with_features, folder)
    bare = shards.shard_path(folder, request.param)
    bare.unlink()
    continued(target_dir, folder, seed=6, num_shards=2)
    return folder, bare


def options(method: str, target_dir: Path, data_dir: Path, heldout_dir: Path, folder: Path) -> TrainingRun:
    return TrainingRun(
        method, target_dir, data_dir, heldout_dir, folder / "run", folder / "export", num_steps=12, batch_tokens=300,
        draft_vocab=64, num_layers=1, block_size=4, num_depths=3, num_heads=2, test_steps=2, markov_rank=8,
        draft_hidden=32, draft_intermediate=48, num_anchors=4, lora_rank=4, max_loss_increase=9.0, eval_every=12,
        dtype="float32", num_threads=1,
    )  # fmt: skip


@pytest.mark.parametrize(
    "method",
    [
        *("deepseek_mtp", "dflash", "dspark", "eagle1", "eagle3", "independent"),
        *("medusa1", "medusa2", "p_eagle", "pard2"),
    ],
)
def test_what_needs_features_names_the_shard_without(
    method: str, partly: tuple[Path, Path], target_dir: Path, with_features: Path, tmp_path: Path
) -> None:
    folder, bare = partly
    with pytest.raises(TrainingDataError, match=rf"{bare.name}: no features.*`paceline data features`"):
        options(method, target_dir, folder, with_features, tmp_path).train()


@pytest.mark.parametrize("method", ["gemma4_mtp", "pard1"])
def test_what_needs_none_goes_on(
    method: str, partly: tuple[Path, Path], target_dir: Path, tmp_path: Path
) -> None:
    assert options(method, target_dir, partly[0], partly[0], tmp_path).train().step == 12


def test_a_batch_has_features_where_all_of_its_texts_do(partly: tuple[Path, Path]) -> None:
    folder, bare = partly
    seen = set()
    for batch in Corpus(folder, 130, seed=1).epoch(0, [0, 1]):
        assert (batch.taps is None) == (batch.hidden is None) == (batch.bare_shard == bare)
        assert batch.part(slice(0, 1)).bare_shard == batch.bare_shard
        seen.add(batch.bare_shard)
    assert seen == {bare, None}


def test_features_do_not_change_the_order_of_the_text(partly: tuple[Path, Path], with_features: Path) -> None:
    ours, whole = (
        list(Corpus(folder, 130, seed=1).epoch(0, [0, 1])) for folder in (partly[0], with_features)
    )
    for a, b in zip(ours, whole, strict=True):
        assert torch.equal(a.tokens, b.tokens)


def test_an_empty_folder_names_both_ways_to_fill_it(tmp_path: Path) -> None:
    with pytest.raises(TrainingDataError, match="`paceline data synth` or `paceline data continue`"):
        Corpus(tmp_path, 100, seed=1)
