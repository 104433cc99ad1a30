"""`paceline checkpoints reduce`: a drafter's vocabulary cut after training, with the same layers behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from paceline.checkpoints import reduce_checkpoint
from paceline.cli import main
from paceline.contract.errors import TrainingDataError
from paceline.methods.checkpoint import CheckpointError, DrafterConfig, load_tensor
from paceline.methods.drafter import Drafter, DraftRequest
from paceline.models import model_fingerprint
from paceline.training import shards
from tests.methods.conftest import VOCAB, Target, text

METHODS = ("deepseek_mtp", "dflash", "dspark", "eagle1", "eagle2", "eagle3", "medusa1", "p_eagle")
Load = Callable[[Path], Drafter]


def write_text(folder: Path, target_dir: Path, answer: Sequence[int], prompt: Sequence[int] = (5,)) -> Path:
    """A conversation, as `paceline data` writes it."""
    folder.mkdir()
    tokens = torch.tensor([*prompt, *answer], dtype=torch.int32)
    segments = torch.full((len(tokens),), shards.SEGMENT_ANSWER, dtype=torch.uint8)
    segments[: len(prompt)] = shards.SEGMENT_TEMPLATE
    offsets, greedy = torch.tensor([0, len(tokens)]), torch.tensor([True])
    shard = shards.Shard(tokens, tokens.clone(), segments, offsets, greedy, None, None)
    shards.write_shard(shards.shard_path(folder, 0), shard)
    shards.write_manifest(folder, {"model_fingerprint": model_fingerprint(target_dir), "command": "it"})
    return folder


def draft(drafter: Drafter, target: Target, num_tokens: int = 5, max_nodes: int = 0) -> list[int]:
    tokens = text(12, seed=4)
    drafter.open(1, tokens)
    if drafter.tap is not None:
        drafter.feed(1, 0, target.features(drafter, tokens)[:-1])
    (entry,) = drafter.draft([DraftRequest(1, num_tokens, max_nodes)])
    drafter.close(1)
    assert entry is not None
    return list(entry.tokens)


@pytest.mark.parametrize("method", METHODS)
def test_what_stays_is_drafted_as_before_and_nothing_else(
    method: str, drafter_dirs: dict[str, Path], load: Load, target: Target, target_dir: Path, tmp_path: Path
) -> None:
    whole = drafter_dirs[method]
    before = draft(load(whole), target)
    frequent = list(dict.fromkeys(before))
    # All that is drafted, once more than the rest; tokens 20 to 39 once each; and of a prompt what does not count.
    answer = [*frequent * 2, *range(20, 40)]
    data = write_text(tmp_path / "text", target_dir, answer, prompt=[90] * 50)
    found = reduce_checkpoint(whole, data, tmp_path / "less", len(frequent) + 3)
    assert (found.num_kept, found.num_counted) == (len(frequent) + 3, len(answer))
    assert found.coverage == found.num_covered / len(answer) < 1
    less = load(tmp_path / "less")
    assert draft(less, target) == before
    kept = {*frequent, *[token for token in range(20, 40) if token not in frequent][:3]}
    assert set(draft(less, target, max_nodes=24)) <= kept
    # Without the first of them something else is drafted in its place.
    data = write_text(tmp_path / "others", target_dir, [token for token in answer if token != before[0]])
    again = reduce_checkpoint(tmp_path / "less", data, tmp_path / "least", len(kept) - 1)
    assert again.num_before == len(kept)
    assert set(draft(load(tmp_path / "least"), target)) <= kept - {before[0]}


def test_the_checkpoint_says_what_was_cut(
    eagle3_dir: Path, medusa1_dir: Path, target_dir: Path, tmp_path: Path
) -> None:
    data = write_text(tmp_path / "text", target_dir, [40, 11, 40, 12, 11, 40, 8])  # 8 is none of theirs
    for directory in (eagle3_dir, medusa1_dir):
        found = reduce_checkpoint(directory, data, tmp_path / "less", 3)
        assert (found.num_counted, found.num_covered) == (7, 6)
        config, before = DrafterConfig.read(tmp_path / "less"), DrafterConfig.read(directory)
        assert config.shape == {**before.shape, "draft_vocab": 3}
        assert config.training["vocabulary"] == {"data": "it", "coverage": 6 / 7}
    assert load_tensor(tmp_path / "less", "token_map").tolist() == [11, 12, 40]
    reduce_checkpoint(eagle3_dir, data, tmp_path / "less", 3)
    assert load_tensor(tmp_path / "less", "d2t").tolist() == [11, 11, 38]
    assert load_tensor(tmp_path / "less", "t2d").nonzero().flatten().tolist() == [11, 12, 40]


def test_what_cannot_be_cut_is_refused(
    drafter_dirs: dict[str, Path], target_dir: Path, pard_model_dir: Path, tmp_path: Path
) -> None:
    data = write_text(tmp_path / "text", target_dir, range(VOCAB))
    eagle1, out = drafter_dirs["eagle1"], tmp_path / "less"
    for method in ("gemma4_mtp", "independent", "pard1"):
        with pytest.raises(CheckpointError, match=f"method '{method}' has no vocabulary to cut"):
            reduce_checkpoint(drafter_dirs[method], data, out, 10)
    for size in (VOCAB, 0):
        with pytest.raises(CheckpointError, match=f"proposes {VOCAB} tokens: {size} cannot be kept"):
            reduce_checkpoint(eagle1, data, out, size)
    with pytest.raises(CheckpointError, match="another directory"):
        reduce_checkpoint(eagle1, data, eagle1, 10)
    others = write_text(tmp_path / "others", pard_model_dir, range(VOCAB))
    with pytest.raises(CheckpointError, match="'others' was written by another target"):
        reduce_checkpoint(eagle1, others, out, 10)
    with pytest.raises(TrainingDataError, match="no answers"):
        reduce_checkpoint(eagle1, write_text(tmp_path / "empty", target_dir, []), out, 10)
    assert not out.exists()


def test_the_command_says_what_is_covered(
    eagle1_dir: Path, target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = write_text(tmp_path / "text", target_dir, [9, 9, 9, 8]), tmp_path / "less"
    command = ["checkpoints", "reduce", str(eagle1_dir), "--data-dir", str(data), "--output", str(out)]
    with pytest.raises(SystemExit) as done:
        main([*command, "--draft-vocab", "1"])
    assert done.value.code == 0
    said = f"{out}: eagle1 proposes 1 of 97 tokens, which are 75.00% of 4 counted in {data}"
    assert said in capsys.readouterr().out.replace("\n", "")
