"""Text that a target without a chat template writes: its own, the same each time, and fit to learn from."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.contract.errors import TrainingDataError
from paceline.models import end_tokens
from paceline.target import SequenceRows, TargetEngine
from paceline.training import shards
from paceline.training.continuations import ContinueOptions, run
from paceline.training.data import Corpus


@pytest.fixture
def options(target_dir: Path, tmp_path: Path) -> ContinueOptions:
    return ContinueOptions(
        target_dir, tmp_path / "text", rows=6, max_tokens=90, ask_fraction=0.3, dtype="float32", num_threads=1
    )


def test_a_shard_is_the_target_s_own_text(options: ContinueOptions, target_dir: Path) -> None:
    counts = run(options)
    shard = shards.read_shard(shards.shard_path(options.out_dir, 0))
    assert counts == {
        "shards": 1,
        "conversations": 6,
        "tokens": shard.tokens.numel(),
        "answer_tokens": int((shard.segments == shards.SEGMENT_ANSWER).sum()),
    }
    engine = TargetEngine.load(target_dir, dtype=torch.float32)
    assert {0, 1} == set(shard.is_greedy.tolist())
    for index, (start, end) in enumerate(zip(shard.offsets[:-1], shard.offsets[1:], strict=True)):
        tokens, tops = shard.tokens[start:end].long(), shard.top_tokens[start:end].long()
        answer = shard.segments[start:end] == shards.SEGMENT_ANSWER
        prompt = int((~answer).sum())
        assert bool(answer[prompt:].all())
        assert len(tokens) <= 90
        best = engine.step([SequenceRows(engine.open(), tokens.tolist())]).logits[0].argmax(-1)
        assert tops[prompt - 1 : -1].tolist() == best[prompt - 1 : -1].tolist()
        assert tops[-1] == -1
        if shard.is_greedy[index]:
            assert tokens[prompt:].tolist() == best[prompt - 1 : -1].tolist()


def test_shards_depend_on_seed_and_index_alone(options: ContinueOptions, tmp_path: Path) -> None:
    run(options)
    other = replace(options, out_dir=tmp_path / "other", num_shards=2)
    run(replace(other, first_shard=1, num_shards=1))
    before = shards.shard_path(other.out_dir, 1).stat().st_mtime_ns
    assert run(other)["shards"] == 2  # goes on where it stopped
    assert shards.shard_path(other.out_dir, 1).stat().st_mtime_ns == before
    first, again = (shards.read_shard(shards.shard_path(o.out_dir, 0)) for o in (options, other))
    assert torch.equal(first.tokens, again.tokens)
    second = shards.read_shard(shards.shard_path(other.out_dir, 1))
    assert not torch.equal(second.tokens[:40], first.tokens[:40])
    batch = next(iter(Corpus(other.out_dir, 400, 1).epoch(0, [0, 1])))
    assert batch.hidden is None
    assert bool(batch.is_answer.any())


def test_a_text_ends_where_serving_would_end_it(
    options: ContinueOptions, target_dir: Path, tmp_path: Path
) -> None:
    """By the generation config where there is one, which often names more tokens than the model's."""
    options = replace(options, greedy_fraction=1.0)
    run(options)
    shard = shards.read_shard(shards.shard_path(options.out_dir, 0))
    start, end = shard.offsets[:2].tolist()
    tokens, segments = shard.tokens[start:end].tolist(), shard.segments[start:end].tolist()
    place = segments.index(shards.SEGMENT_ANSWER) + 2
    assert place < len(tokens) - 1
    model_dir = tmp_path / "model"
    shutil.copytree(target_dir, model_dir)
    (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, tokens[place]]}))
    assert end_tokens(model_dir) == [2, tokens[place]]
    assert end_tokens(target_dir) == [2]
    run(replace(options, model_dir=model_dir, out_dir=tmp_path / "ended"))
    again = shards.read_shard(shards.shard_path(tmp_path / "ended", 0))
    first = tokens.index(tokens[place], segments.index(shards.SEGMENT_ANSWER))
    assert again.tokens[: int(again.offsets[1])].tolist() == tokens[: first + 1]


@pytest.mark.parametrize(
    ("field", "value"), [("rows", 0), ("max_tokens", 2), ("top_p", 1.5), ("top_p", 0.0), ("temperature", 0.0)]
)
def test_bad_options_are_named(options: ContinueOptions, field: str, value: float) -> None:
    with pytest.raises(TrainingDataError, match=field):
        run(replace(options, **{field: value}))
