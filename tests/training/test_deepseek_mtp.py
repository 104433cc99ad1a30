"""Multi-token prediction's objective equals its formulas written out, learns, and resumes exactly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.contract.errors import TrainingDataError
from paceline.methods.checkpoint import DrafterConfig
from paceline.methods.deepseek_mtp import start as deepseek_mtp_start
from paceline.methods.deepseek_mtp.objective import DeepseekMtpObjective, MtpShape
from paceline.methods.drafter import DraftRequest
from paceline.methods.loading import load_drafter
from paceline.training.data import Batch
from paceline.training.objective import TargetReference
from paceline.training.token_rows import depth_weights
from tests.methods.mtp_reference import ReferenceMtp
from tests.training.test_trainer import _acceptance, _newest, _options

SHAPE = MtpShape(
    hidden=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=12,
    intermediate=40,
    target_vocab=53,
    target_layers=3,
    rope_theta=5000.0,
    rms_eps=1e-5,
    num_modules=2,
    carries_norm=False,
)
ROWS, LENGTH = 3, 15


def random_parameters(shape: MtpShape, seed: int = 3) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        name: 1.0 + 0.2 * torch.randn(size, generator=random)
        if len(size) == 1
        else torch.randn(size, generator=random) * size[-1] ** -0.5
        for name, size in shape.parameter_shapes().items()
    }


def random_batch(seed: int = 4) -> Batch:
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, SHAPE.target_vocab, (ROWS, LENGTH), generator=random)
    lengths = torch.tensor([LENGTH, 12, 9])
    answer = torch.rand(ROWS, LENGTH, generator=random) < 0.7
    answer &= torch.arange(LENGTH)[None] < lengths[:, None]
    return Batch(
        tokens=tokens,
        top_tokens=torch.randint(0, SHAPE.target_vocab, (ROWS, LENGTH), generator=random),
        is_answer=answer,
        is_greedy=torch.ones(ROWS, dtype=torch.bool),
        lengths=lengths,
        taps=None,
        hidden=torch.randn(ROWS, LENGTH, SHAPE.hidden, generator=random) * 2.0,
    )


def tables() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(9)
    embedding, head = torch.randn(2, SHAPE.target_vocab, SHAPE.hidden, generator=random)
    return embedding, head


def objective(shape: MtpShape = SHAPE, **changes: object) -> DeepseekMtpObjective:
    settings: dict[str, object] = {"dtype": torch.float32, "steps": 3, "step_decay": 0.6, **changes}
    facts = TargetReference("f", "tiny", (), 64)
    return DeepseekMtpObjective(shape, random_parameters(shape), *tables(), facts, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("loss", ["ce", "kl"])
@pytest.mark.parametrize(
    "shape", [SHAPE, replace(SHAPE, num_modules=1, carries_norm=True)], ids=["two", "one"]
)
def test_loss_is_that_of_the_formulas(shape: MtpShape, loss: str) -> None:
    """Every proposal of every row is made by the reference alone, from the text up to there."""
    ours, batch = objective(shape, loss=loss), random_batch()
    found, shown = ours.loss(batch)
    embedding, head = tables()
    reference = ReferenceMtp(shape, random_parameters(shape), embedding, head)
    assert batch.hidden is not None
    expected = 0.0
    for j, weight in enumerate((1.0, 0.6, 0.36)):
        losses = []
        for row in range(ROWS):
            tokens = batch.tokens[row].tolist()
            for r in range(LENGTH - 2 - j):
                if not batch.is_answer[row, r + 2 + j]:
                    continue
                logits = reference.logits(batch.hidden[row], tokens[: r + 2], tokens[r + 2 : r + 2 + j])[-1]
                if loss == "ce":
                    losses.append(F.cross_entropy(logits[None], torch.tensor([tokens[r + 2 + j]])))
                else:
                    probs = (head @ batch.hidden[row, r + 1 + j]).softmax(-1)
                    losses.append(-(probs * logits.log_softmax(-1)).sum())
        expected += weight / 1.96 * float(torch.stack(losses).mean())
    assert float(found.detach()) == pytest.approx(expected, rel=1e-4)
    assert set(shown) == {"depth_1", "depth_2", "depth_3"}


def test_gradients_are_those_of_differences() -> None:
    ours, batch = objective(), random_batch()
    ours.loss(batch)[0].backward()
    random = torch.Generator().manual_seed(2)
    parameters = ours.named_parameters()
    gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    assert set(gradients) == set(parameters)
    directions = {name: torch.randn(p.shape, generator=random) for name, p in parameters.items()}
    slope = sum(float((gradients[name] * directions[name]).sum()) for name in parameters)

    def moved(step: float) -> float:
        with torch.no_grad():
            for name, p in parameters.items():
                p += step * directions[name]
        value = float(ours.loss(batch)[0].detach())
        with torch.no_grad():
            for name, p in parameters.items():
                p -= step * directions[name]
        return value

    assert (moved(2e-4) - moved(-2e-4)) / 4e-4 == pytest.approx(slope, rel=2e-2)


def test_weights_of_depths() -> None:
    assert depth_weights(3, 0.6) == pytest.approx([0.51, 0.306, 0.184], abs=1e-3)  # 2509.18362
    assert depth_weights(4, 1.0) == [0.25] * 4


@pytest.mark.parametrize("num_modules", [1, 2])
def test_stopped_and_resumed_equals_uninterrupted(
    num_modules: int, target_dir: Path, text_dir: Path, heldout_dir: Path, tmp_path: Path
) -> None:
    changes: dict[str, object] = {
        "method": "deepseek_mtp", "token_rows": 40, "optimizer": "muon", "num_modules": num_modules
    }  # fmt: skip
    whole = _options(target_dir, text_dir, heldout_dir, tmp_path / "whole", **changes)
    whole.train()
    parts = _options(target_dir, text_dir, heldout_dir, tmp_path / "parts", **changes)
    assert parts.train(stop_after=5).step == 5
    torch.rand(7)  # whatever else drew in between
    assert parts.train().step == 12
    first, second = _newest(whole.run_dir), _newest(parts.run_dir)
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert DrafterConfig.read(parts.export_dir).shape["num_modules"] == num_modules


def test_training_from_anywhere_raises_acceptance_and_what_it_writes_drafts(
    target_dir: Path, text_dir: Path, heldout_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a map of noise: the fitted one leaves little to learn on so small a target."""
    changes: dict[str, object] = {
        "method": "deepseek_mtp", "num_steps": 30, "eval_every": 30, "checkpoint_every": 30, "learning_rate": 5e-3
    }  # fmt: skip
    options = _options(target_dir, text_dir, heldout_dir, tmp_path / "spoiled", **changes)
    fitted = _acceptance(_options(target_dir, text_dir, heldout_dir, tmp_path / "fitted", **changes), None)
    noise = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)) * 0.05
    start = deepseek_mtp_start.MtpStart(noise, torch.ones(64))
    monkeypatch.setattr("paceline.methods.deepseek_mtp.recipe.fit_projection", lambda *_: start)
    untrained = _acceptance(options, None)
    trained = options.train().best_mean_accepted
    assert untrained + 0.2 < trained
    assert untrained + 0.2 < fitted
    drafter = load_drafter(options.export_dir, target_dir, dtype=torch.float32)
    drafter.open(1, list(range(5, 12)))
    drafter.feed(1, 0, torch.randn(6, 64))
    (entry,) = drafter.draft([DraftRequest(1, 6)])
    assert entry is not None
    assert len(entry.tokens) == 6


@pytest.mark.parametrize(("field", "value"), [("num_modules", 0), ("depth_loss", "mse")])
def test_bad_options_are_named(
    field: str, value: object, target_dir: Path, text_dir: Path, heldout_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(TrainingDataError, match=field):
        _options(target_dir, text_dir, heldout_dir, tmp_path, method="deepseek_mtp", **{field: value}).train()


def test_parameters_that_do_not_fit_are_named() -> None:
    parameters = random_parameters(SHAPE)
    del parameters["layers.1.hnorm.weight"]
    with pytest.raises(TrainingDataError, match=r"layers\.1\.hnorm"):
        DeepseekMtpObjective(SHAPE, parameters, *tables(), TargetReference("f", "tiny", (), 64))
    assert all(isinstance(p, nn.Parameter) for p in objective().named_parameters().values())


@pytest.mark.parametrize("largest", [1.0, 30.0])
def test_a_start_is_in_units_in_which_entries_are_alike(
    largest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm's weights that undo one large entry, as Gemma's do, are left to the map."""
    random = torch.Generator().manual_seed(3)
    count, width = 4000, 8
    tokens = torch.randint(0, 50, (count,), generator=random)
    embedding = torch.randn(50, width, generator=random)
    before = torch.randn(count, width, generator=random)
    after = F.rms_norm(before, (width,)) @ torch.randn(width, width, generator=random)
    final_norm = torch.full((width,), 2.0)
    final_norm[0] /= largest  # before the norm the first entry is so many times as large
    monkeypatch.setattr(deepseek_mtp_start, "take_rows", lambda *_: (tokens, before, after))
    start = deepseek_mtp_start.fit_projection(None, embedding, final_norm, 1e-6, count)  # type: ignore[arg-type]
    inputs = torch.cat([F.rms_norm(embedding[tokens], (width,)), F.rms_norm(before, (width,))], dim=1)
    told = inputs @ start.projection.T
    if largest == 1.0:
        torch.testing.assert_close(start.norm, final_norm)
    else:
        assert len(set(start.norm.tolist())) == 1
        torch.testing.assert_close(start.norm[0], after.square().mean().sqrt())
    torch.testing.assert_close(told * start.norm, after, atol=0.05, rtol=0.05)
    assert float(told.square().mean(0).max() / told.square().mean(0).min()) < 30
