"""A model and its modules from nothing: it learns, resumes exactly, and the pair that it writes serves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.drafters import DraftRequest, load_drafter
from paceline.sampling import SamplingParams
from paceline.target import SequenceRows, TargetEngine
from paceline.training.errors import TrainingDataError
from paceline.training.pretrain import PretrainOptions, run
from tests.training.test_trainer import _newest


@pytest.fixture
def options(target_dir: Path, text_dir: Path, heldout_dir: Path, tmp_path: Path) -> PretrainOptions:
    return PretrainOptions(
        target_dir,
        text_dir,
        heldout_dir,
        tmp_path / "run",
        tmp_path / "pair",
        hidden=32,
        num_layers=2,
        num_heads=4,
        head_dim=8,
        intermediate=48,
        num_modules=2,
        num_steps=8,
        batch_tokens=256,
        warmup_steps=2,
        eval_every=8,
        checkpoint_every=4,
        num_threads=1,
    )


def test_it_learns_and_the_pair_serves(options: PretrainOptions) -> None:
    first = run(replace(options, num_steps=1, run_dir=options.run_dir / "other", eval_every=1))
    last = run(replace(options, num_steps=30, eval_every=30))
    assert last.own < first.own - 0.3
    assert last.modules < first.modules - 0.3
    assert len(last.accepted) == 2
    assert all(0 < share < 1 for share in last.accepted)
    model = options.export_dir / "model"
    drafter = load_drafter(options.export_dir / "drafter", model, dtype=torch.float32)
    assert drafter.tap is not None
    engine = TargetEngine.load(model, dtype=torch.float32, taps=[drafter.tap])
    tokens = list(range(40, 52))
    output = engine.step([SequenceRows(engine.open(), tokens, num_logits="last")])
    drafter.open(1, [*tokens, int(output.logits[0][-1].argmax())])
    drafter.feed(1, 0, output.features[0])
    (entry,) = drafter.draft([DraftRequest(1, 3, sampling=SamplingParams(temperature=0.0))])
    assert entry is not None
    assert len(entry.tokens) == 3
    for path in (model, options.export_dir / "drafter"):  # images run as another user
        assert (path / "model.safetensors").stat().st_mode & 0o777 == 0o644
        assert not list(path.glob("*.part"))


def test_stopped_and_resumed_equals_uninterrupted(options: PretrainOptions, tmp_path: Path) -> None:
    run(options)
    parts = replace(options, run_dir=tmp_path / "parts")
    assert run(parts, stop_after=5).step == 5
    torch.rand(7)  # whatever else drew in between
    assert run(parts).step == 8
    first, second = _newest(options.run_dir), _newest(parts.run_dir)
    assert all(torch.equal(first[k], second[k]) for k in first)
    with pytest.raises(TrainingDataError, match="another kind of run"):
        run(replace(parts, hidden=64))


@pytest.mark.parametrize(
    ("field", "value"), [("num_modules", 0), ("num_kv_heads", 3), ("head_dim", 7), ("floor", 0.0)]
)
def test_bad_options_are_named(options: PretrainOptions, field: str, value: float) -> None:
    with pytest.raises(TrainingDataError, match=field):
        run(replace(options, **{field: value}))
