"""Drafters with the target's own head that propose a part of its vocabulary: the same layer, fewer rows of the head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.methods.checkpoint import CheckpointError, DrafterConfig, save_drafter
from paceline.methods.deepseek_mtp.nextn import write_nextn
from paceline.methods.drafter import DraftRequest
from paceline.methods.eagle.layout import read_eagle, write_eagle
from paceline.methods.layouts.public_checkpoint import PublicCheckpoint
from paceline.methods.layouts.target_facts import TargetFacts
from paceline.methods.layouts.tensor_files import read_tensors
from paceline.methods.loading import load_drafter
from paceline.methods.target_vocabulary import TOKEN_MAP
from paceline.models import model_fingerprint
from paceline.sampling.params import SamplingParams
from tests.methods.conftest import DRAFT_IDS, MTP_SHAPE, VOCAB, Target, mtp_tensors, save_mtp, text

METHODS = ("eagle1", "deepseek_mtp")


def reduced(directory: Path, whole: Path, ids: list[int]) -> Path:
    """The checkpoint `whole` with a map."""
    config = DrafterConfig.read(whole)
    tensors = {**read_tensors(whole), TOKEN_MAP: torch.tensor(ids)}
    shape = {**config.shape, "draft_vocab": len(ids)}
    save_drafter(directory, DrafterConfig(config.method, config.target_fingerprint, "tiny", shape), tensors)
    return directory


@pytest.fixture
def whole(method: str, eagle1_dir: Path, target_dir: Path, tmp_path: Path) -> Path:
    if method == "eagle1":
        return eagle1_dir
    (tmp_path / "mtp").mkdir()
    return save_mtp(tmp_path / "mtp", target_dir, MTP_SHAPE, mtp_tensors(MTP_SHAPE))


def draft(directory: Path, target_dir: Path, target: Target, num_tokens: int, **request: object) -> list[int]:
    drafter = load_drafter(directory, target_dir, dtype=torch.float32)
    tokens = text(12, seed=4)
    drafter.open(1, tokens)
    drafter.feed(1, 0, target.features(drafter, tokens)[:-1])
    (entry,) = drafter.draft([DraftRequest(1, num_tokens, **request)])  # type: ignore[arg-type]
    assert entry is not None
    entry.check(16, VOCAB)
    return list(entry.tokens)


@pytest.mark.parametrize("method", METHODS)
def test_a_map_of_everything_changes_nothing(
    method: str, whole: Path, target_dir: Path, target: Target, tmp_path: Path
) -> None:
    shuffled = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3)).tolist()
    directory = reduced(tmp_path, whole, shuffled)
    assert draft(directory, target_dir, target, 6) == draft(whole, target_dir, target, 6)
    tree = {"max_nodes": 12}
    expected = draft(whole, target_dir, target, 4, **tree)
    assert sorted(draft(directory, target_dir, target, 4, **tree)) == sorted(expected)
    coupled = {"sampling": SamplingParams(temperature=0.9, seed=5)}
    assert draft(directory, target_dir, target, 6, **coupled) == draft(
        whole, target_dir, target, 6, **coupled
    )


@pytest.mark.parametrize("method", METHODS)
def test_only_tokens_of_the_map_are_proposed(
    method: str, whole: Path, target_dir: Path, target: Target, tmp_path: Path
) -> None:
    ids = list(DRAFT_IDS)
    first = draft(whole, target_dir, target, 1)[0]
    ids = [token for token in ids if token != first][:100]
    directory = reduced(tmp_path, whole, ids)
    for request in ({}, {"max_nodes": 12}, {"sampling": SamplingParams(temperature=1.2, seed=7)}):
        tokens = draft(directory, target_dir, target, 5, **request)
        assert set(tokens) <= set(ids)
        assert len(set(tokens)) > 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ids", [[3, 3], [0, VOCAB], [-1, 4]])
def test_maps_that_name_no_distinct_tokens_are_refused(
    method: str, ids: list[int], whole: Path, target_dir: Path, tmp_path: Path
) -> None:
    directory = reduced(tmp_path, whole, ids)
    with pytest.raises(CheckpointError, match="token_map does not name 2 distinct ids"):
        load_drafter(directory, target_dir, dtype=torch.float32)


@pytest.mark.parametrize("method", METHODS)
def test_public_layouts_have_no_place_for_a_map(
    method: str, whole: Path, target_dir: Path, tmp_path: Path
) -> None:
    directory = reduced(tmp_path, whole, list(DRAFT_IDS))
    config, tensors = DrafterConfig.read(directory), read_tensors(directory)
    out = tmp_path / "public"
    out.mkdir()
    (write_eagle if method == "eagle1" else write_nextn)(out, config, tensors)
    assert not any(TOKEN_MAP in name for name in read_tensors(out))
    if method == "eagle1":
        facts = TargetFacts(model_fingerprint(target_dir), "tiny", config.size("hidden"), VOCAB, 64, 2, None)
        again, found = read_eagle(PublicCheckpoint.open(out), facts)
        assert "draft_vocab" not in again.shape
        assert set(found) == set(tensors) - {TOKEN_MAP}
