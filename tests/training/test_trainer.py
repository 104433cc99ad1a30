"""The trainer learns, resumes exactly after a kill, and what it writes is a drafter that serves."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.contract.errors import TrainingDataError
from paceline.methods.drafter import DraftRequest
from paceline.methods.loading import load_drafter
from paceline.training.acceptance import ChainAcceptance
from paceline.training.data import Corpus, DataPosition
from paceline.training.loop import learning_rate_factor
from paceline.training.shards import shard_indices
from tests.training.training_run import TrainingRun

# Heads begin as a fitted linear look-ahead, and a random target's text has little else to learn.
GAIN = {"medusa1": 0.02, "medusa2": 0.02}


def _options(
    target_dir: Path, text_dir: Path, heldout_dir: Path, out: Path, **changes: object
) -> TrainingRun:
    settings: dict[str, object] = {
        "method": "eagle3",
        "num_steps": 12,
        "batch_tokens": 288,
        "warmup_steps": 2,
        "draft_vocab": 128,
        "test_steps": 3,
        "eval_every": 6,
        "checkpoint_every": 4,
        "dtype": "float32",
        "num_threads": 1,
        "num_layers": 2,
        **changes,
    }
    return TrainingRun(
        model_dir=target_dir,
        data_dir=text_dir,
        heldout_dir=heldout_dir,
        run_dir=out / "run",
        export_dir=out / "drafter",
        **settings,  # type: ignore[arg-type]
    )


def _newest(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(sorted(run_dir.glob("step-*"))[-1] / "weights.safetensors")


def _acceptance(run: TrainingRun, weights: dict[str, torch.Tensor] | None) -> float:
    options = run.options
    objective = run.objective(Corpus(options.data_dir, options.batch_tokens, options.seed))
    if weights is not None:
        with torch.no_grad():
            for name, parameter in objective.named_parameters().items():
                parameter.copy_(weights[name])
    heldout = Corpus(options.heldout_dir, options.batch_tokens, options.seed, greedy_only=True)
    counts = ChainAcceptance()
    for batch in heldout.epoch(0, shard_indices(options.heldout_dir)):
        counts = counts + objective.evaluate(batch)
    assert counts.reached[0] > 50
    return counts.mean_accepted


@pytest.mark.parametrize(
    ("method", "draft_vocab"),
    [
        ("eagle3", 128),
        ("independent", 0),
        ("independent", 128),
        ("medusa1", 128),
        ("medusa2", 128),
        ("dflash", 128),
        ("dspark", 128),
        ("p_eagle", 128),
        ("pard1", 0),
        ("pard2", 0),
    ],
)
def test_training_raises_heldout_acceptance(
    method: str, draft_vocab: int, target_dir: Path, text_dir: Path, heldout_dir: Path, tmp_path: Path
) -> None:
    options = _options(
        target_dir,
        text_dir,
        heldout_dir,
        tmp_path,
        method=method,
        draft_vocab=draft_vocab,
        num_steps=60,
        eval_every=30,
        checkpoint_every=60,
        learning_rate=3e-3,
        head_learning_rate=3e-3,
    )
    result = options.train()
    untrained, trained = _acceptance(options, None), _acceptance(options, _newest(options.run_dir))
    assert trained > untrained + GAIN.get(method, 0.04)
    assert result.best_mean_accepted >= trained - 1e-9
    config = json.loads((options.export_dir / "config.json").read_text())
    assert config["method"] == method
    assert config["training"]["heldout_mean_accepted_of_5"] == round(result.best_mean_accepted, 4)
    assert config["training"]["seconds"] >= 0
    assert config["shape"].get("draft_vocab", 0) == draft_vocab


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_loss_falls_on_one_batch(
    optimizer: str, target_dir: Path, text_dir: Path, heldout_dir: Path, tmp_path: Path
) -> None:
    options = _options(
        target_dir,
        text_dir,
        heldout_dir,
        tmp_path,
        optimizer=optimizer,
        learning_rate=3e-3,
        head_learning_rate=3e-3,
    )
    corpus = Corpus(text_dir, 288, 1)
    objective = options.objective(corpus)
    batch = next(corpus.batches(DataPosition()))
    optimizers = options.optimizers(objective)
    losses = []
    for _ in range(15):
        loss, _ = objective.loss(batch)
        losses.append(float(loss.detach()))
        for one in optimizers:
            one.zero_grad()
        loss.backward()
        for one in optimizers:
            one.step()
    assert losses[-1] < losses[0] - 0.2


@pytest.mark.parametrize("method", ["dflash", "dspark", "eagle3", "medusa2", "p_eagle", "pard1", "pard2"])
def test_stopped_and_resumed_equals_uninterrupted(
    method: str, target_dir: Path, text_dir: Path, heldout_dir: Path, tmp_path: Path
) -> None:
    whole = _options(target_dir, text_dir, heldout_dir, tmp_path / "whole", method=method)
    whole.train()
    parts = _options(target_dir, text_dir, heldout_dir, tmp_path / "parts", method=method)
    assert parts.train(stop_after=5).step == 5
    assert parts.train().step == 12
    first, second = _newest(whole.run_dir), _newest(parts.run_dir)
    assert all(torch.equal(first[k], second[k]) for k in first)


def test_time_adds_up_over_the_processes_of_a_run(
    target_dir: Path, text_dir: Path, heldout_dir: Path, tmp_path: Path
) -> None:
    options = _options(target_dir, text_dir, heldout_dir, tmp_path)
    options.train(stop_after=5)

    def seconds() -> float:
        newest = sorted(options.run_dir.glob("step-*"))[-1]
        return float(json.loads((newest / "state.json").read_text())["seconds"])

    first = seconds()
    assert first > 0
    started = time.monotonic()
    options.train()
    assert first < seconds() <= first + time.monotonic() - started


def test_a_reduced_vocabulary_is_the_most_frequent_tokens_and_survives_a_stop(
    target_dir: Path, text_dir: Path, heldout_dir: Path, tmp_path: Path
) -> None:
    whole = _options(
        target_dir, text_dir, heldout_dir, tmp_path / "whole", method="independent", draft_vocab=90
    )
    parts = _options(
        target_dir, text_dir, heldout_dir, tmp_path / "parts", method="independent", draft_vocab=90
    )
    whole.train()
    parts.train(stop_after=5)
    parts.train()
    first, second = _newest(whole.run_dir), _newest(parts.run_dir)
    assert all(torch.equal(first[k], second[k]) for k in first)
    d2t = load_file(parts.export_dir / "model.safetensors")["d2t"]
    ids = d2t + torch.arange(90)
    counts = Corpus(text_dir, 288, 1).count_answer_tokens(259)
    others = torch.ones(259, dtype=torch.bool).index_fill(0, ids, False)
    assert int(counts[ids].min()) >= int(counts[others].max())
    drafter = load_drafter(parts.export_dir, target_dir, dtype=torch.float32)
    prompt = ids[:12].tolist()
    drafter.open(1, prompt)
    (entry,) = drafter.draft([DraftRequest(1, 6)])
    assert entry is not None
    assert set(entry.tokens) <= set(ids.tolist())


def test_a_vocabulary_larger_than_the_targets_is_refused(
    target_dir: Path, text_dir: Path, heldout_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(TrainingDataError, match="draft vocabulary 300 exceeds"):
        _options(target_dir, text_dir, heldout_dir, tmp_path, method="independent", draft_vocab=300).train()


def test_killed_run_resumes_exactly(
    target_dir: Path, text_dir: Path, heldout_dir: Path, tmp_path: Path
) -> None:
    whole = _options(target_dir, text_dir, heldout_dir, tmp_path / "whole", optimizer="muon")
    whole.train()
    killed = _options(target_dir, text_dir, heldout_dir, tmp_path / "killed", optimizer="muon")
    code = (
        "from pathlib import PosixPath; from paceline.methods.eagle3.recipe import RECIPE, Eagle3Options; "
        "from paceline.training.trainer import TrainOptions, run; "
        f"run({killed.options!r}, RECIPE, {killed.own!r})"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not list(killed.run_dir.glob("step-*")):
        assert process.poll() is None, "the run ended before its first checkpoint"
        assert time.monotonic() < deadline
    process.kill()
    process.wait()
    killed.train()
    first, second = _newest(whole.run_dir), _newest(killed.run_dir)
    assert all(torch.equal(first[k], second[k]) for k in first)


def test_data_order_names_every_conversation_once_and_can_be_entered_anywhere(text_dir: Path) -> None:
    corpus = Corpus(text_dir, 288, 3)
    ids = shard_indices(text_dir)
    batches = list(corpus.epoch(0, ids))
    assert sum(batch.tokens.shape[0] for batch in batches) == 32
    assert all(batch.tokens.numel() <= 288 for batch in batches)
    rest = list(corpus.epoch(0, ids, skip=2))
    assert [b.tokens.tolist() for b in rest] == [b.tokens.tolist() for b in batches[2:]]
    other = list(corpus.epoch(1, ids))
    assert [b.tokens.tolist() for b in other] != [b.tokens.tolist() for b in batches]


def test_text_of_another_target_is_refused(
    target_dir: Path, text_dir: Path, heldout_dir: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in target_dir.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-4}))
    with pytest.raises(TrainingDataError, match="another target"):
        _options(other, text_dir, heldout_dir, tmp_path).train()


@pytest.mark.parametrize(
    ("method", "field", "value"),
    [
        ("eagle3", "num_steps", 0),
        ("eagle3", "optimizer", "sgd"),
        ("eagle3", "learning_rate", 0.0),
        ("eagle3", "draft_vocab", -1),
        ("p_eagle", "keep_ratio", 0.0),
        ("p_eagle", "num_segments", 0),
        ("medusa1", "output", "none"),
        ("medusa1", "num_heads", 1000),
        ("medusa2", "base_loss", "mse"),
        ("medusa2", "heads_first", 1.0),
        ("medusa2", "backbone_divisor", 0.0),
    ],
)
def test_bad_options_are_named(
    method: str,
    field: str,
    value: object,
    target_dir: Path,
    text_dir: Path,
    heldout_dir: Path,
    tmp_path: Path,
) -> None:
    with pytest.raises(TrainingDataError, match=field):
        _options(target_dir, text_dir, heldout_dir, tmp_path, method=method, **{field: value}).train()


def test_unknown_method_is_refused(
    target_dir: Path, text_dir: Path, heldout_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(TrainingDataError, match="oracle"):
        _options(target_dir, text_dir, heldout_dir, tmp_path, method="oracle").train()


def test_acceptance_counts() -> None:
    right = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 1], [1, 1, 1]], dtype=torch.bool)
    counts = ChainAcceptance.from_chains(right) + ChainAcceptance()
    assert counts.accepted == (3, 2, 1)
    assert counts.per_depth == [3 / 4, 2 / 3, 1 / 2]
    assert counts.mean_accepted == 6 / 4
    assert (counts + counts).mean_accepted == 6 / 4


def test_learning_rate_factor() -> None:
    values = [learning_rate_factor(step, 100, 10, 0.1) for step in range(101)]
    assert values[0] == pytest.approx(0.1)
    assert max(values) == pytest.approx(1.0)
    assert values[9] == pytest.approx(1.0)
    assert values[100] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(values[10:]))
