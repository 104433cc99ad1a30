"""EAGLE-1's objective equals its formulas written out, and resumes exactly although it draws noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.contract.errors import TrainingDataError
from paceline.methods.checkpoint import DrafterConfig, load_tensor
from paceline.methods.eagle import feature_start as eagle1_start
from paceline.methods.eagle.feature_objective import Eagle1Objective, Eagle1Shape
from paceline.methods.eagle1.drafter import rank_accuracies
from paceline.training.data import Batch, Corpus, DataPosition
from paceline.training.losses import head_distillation
from paceline.training.objective import TargetReference
from paceline.training.shards import shard_indices
from tests.training.test_trainer import _acceptance, _newest, _options

SHAPE = Eagle1Shape(
    hidden=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=12,
    intermediate=40,
    target_vocab=53,
    rope_theta=5000.0,
    rms_eps=1e-5,
)
ROWS, LENGTH = 3, 17


def random_parameters(seed: int = 3) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        name: 1.0 + 0.2 * torch.randn(size, generator=random)
        if name.endswith("norm.weight")
        else torch.randn(size, generator=random) * size[-1] ** -0.5
        for name, size in SHAPE.parameter_shapes().items()
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


def objective(**changes: object) -> Eagle1Objective:
    random = torch.Generator().manual_seed(9)
    embedding, head = torch.randn(2, SHAPE.target_vocab, SHAPE.hidden, generator=random)
    settings: dict[str, object] = {"noise": 0.0, "dtype": torch.float32, **changes}
    facts = TargetReference("f", "tiny", (), 64)
    return Eagle1Objective(SHAPE, random_parameters(), embedding, head, facts, **settings)  # type: ignore[arg-type]


def predict(w: dict[str, Tensor], embedding: Tensor, tokens: list[int], features: Tensor) -> Tensor:
    """Row r: the feature of position r + 1 from token r + 1 and the feature of r; one text, no batch."""
    n, hd, eps = len(tokens) - 1, SHAPE.head_dim, SHAPE.rms_eps
    joined = torch.cat([embedding[torch.tensor(tokens[1:])], features[:n]], dim=-1)
    x = joined @ w["fc.weight"].T + w["fc.bias"]
    q, k, v = (
        (x @ w[f"layers.0.self_attn.{name}_proj.weight"].T).view(n, -1, hd) for name in ("q", "k", "v")
    )
    angles = torch.arange(n)[:, None] * SHAPE.rope_theta ** (-torch.arange(0, hd, 2) / hd)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def rotated(heads: Tensor) -> Tensor:
        turned = torch.complex(heads[..., : hd // 2], heads[..., hd // 2 :]) * turn
        return torch.cat([turned.real, turned.imag], dim=-1)

    groups = SHAPE.num_heads // SHAPE.num_kv_heads
    scores = torch.einsum("ihd,jhd->hij", rotated(q), rotated(k).repeat_interleave(groups, 1)) / hd**0.5
    scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    mixed = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v.repeat_interleave(groups, 1)).reshape(n, -1)
    x = x + mixed @ w["layers.0.self_attn.o_proj.weight"].T
    m = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w["layers.0.post_attention_layernorm.weight"]
    gated = F.silu(m @ w["layers.0.mlp.gate_proj.weight"].T) * (m @ w["layers.0.mlp.up_proj.weight"].T)
    return x + gated @ w["layers.0.mlp.down_proj.weight"].T


def written_out(w: dict[str, Tensor], ours: Eagle1Objective, batch: Batch) -> Tensor:
    """The published loss, entry by entry."""
    embedding, head = ours._embedding, ours._head.weight
    assert batch.hidden is not None
    feature = token = torch.zeros(())
    count = 0
    for text in range(ROWS):
        features = batch.hidden[text]
        predicted = predict(w, embedding, batch.tokens[text].tolist(), features)
        for r in range(LENGTH - 2):
            if not batch.is_answer[text, r + 2]:
                continue
            count += 1
            difference = (predicted[r] - features[r + 1]).abs()
            feature = feature + torch.where(difference < 1, difference**2 / 2, difference - 0.5).mean()
            probs = (head @ features[r + 1]).softmax(-1)
            token = token - (probs * (head @ predicted[r]).log_softmax(-1)).sum()
    return (feature + 0.1 * token) / (count + 1e-5)


def test_loss_and_gradients_are_those_of_the_formulas() -> None:
    ours, batch = objective(), random_batch()
    loss, shown = ours.loss(batch)
    loss.backward()
    plain = {k: nn.Parameter(v.detach().clone()) for k, v in ours.named_parameters().items()}
    expected = written_out(dict(plain), ours, batch)
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert float(loss.detach()) == pytest.approx(shown["feature"] + 0.1 * shown["token"], rel=1e-5)
    for name, parameter in ours.named_parameters().items():
        torch.testing.assert_close(parameter.grad, plain[name].grad, rtol=1e-3, atol=1e-6, msg=name)


def test_weights_of_the_losses_and_rows_of_the_second() -> None:
    batch = random_batch()
    _, shown = objective().loss(batch)
    loss, _ = objective(feature_weight=2.0, token_weight=0.5).loss(batch)
    assert float(loss.detach()) == pytest.approx(2.0 * shown["feature"] + 0.5 * shown["token"], rel=1e-5)
    torch.manual_seed(0)
    some = [objective(token_rows=4).loss(batch)[1] for _ in range(400)]
    assert {s["feature"] for s in some} == {shown["feature"]}
    assert len({s["token"] for s in some}) > 100
    assert sum(s["token"] for s in some) / len(some) == pytest.approx(shown["token"], rel=0.05)


def test_noise_is_uniform_and_falls_with_the_length_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = random_batch()
    assert batch.hidden is not None
    for lengths, reach in ((batch.lengths, 0.1), (torch.full((ROWS,), 2048), 0.025)):
        long = Batch(*(getattr(batch, f) if f != "lengths" else lengths for f in batch.__slots__))
        ours, read = objective(noise=0.1), []
        unroll = ours.unroll
        monkeypatch.setattr(
            ours, "unroll", lambda w, b, f, n, u=unroll, r=read: (r.append(f), u(w, b, f, n))[1]
        )
        ours.loss(long)
        noise = read[0] - batch.hidden
        assert float(noise.abs().max()) <= reach
        assert float(noise.std()) == pytest.approx(reach / 3**0.5, rel=0.1)
        assert abs(float(noise.mean())) < 0.1 * reach


def test_head_distillation_equals_autograd() -> None:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(300, 24, generator=random, requires_grad=True)  # more than two chunks
    teacher, weight = torch.randn(300, 24, generator=random), torch.randn(71, 24, generator=random)
    ours = head_distillation(x, teacher, weight)
    (gradient,) = torch.autograd.grad(3.0 * ours, x)
    plain = F.cross_entropy(x @ weight.T, (teacher @ weight.T).softmax(-1))
    (expected,) = torch.autograd.grad(3.0 * plain, x)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(gradient, expected)


def test_ranks_are_those_of_the_target_s_choices(
    target_dir: Path, text_dir: Path, heldout_dir: Path, tmp_path: Path
) -> None:
    options = _options(target_dir, text_dir, heldout_dir, tmp_path, method="eagle1")
    options.train()
    config = DrafterConfig.read(options.export_dir)
    table = rank_accuracies(config)
    assert table is not None
    reached = config.training["heldout_greedy_acceptance_per_depth"]
    assert table[0][0] == pytest.approx(reached[0], abs=1e-4)
    assert len(table) == 5
    assert all(sum(row) <= 1.0 + 1e-3 for row in table)


@pytest.mark.parametrize("method", ["eagle1", "deepseek_mtp"])
def test_a_part_of_the_vocabulary_is_measured_and_exported(
    method: str, target_dir: Path, text_dir: Path, heldout_dir: Path, tmp_path: Path
) -> None:
    common: dict[str, object] = {"method": method, "num_steps": 2, "eval_every": 2, "checkpoint_every": 1}
    whole = _options(target_dir, text_dir, heldout_dir, tmp_path / "whole", **common, draft_vocab=0)
    part = _options(target_dir, text_dir, heldout_dir, tmp_path / "part", **common, draft_vocab=9)
    accepted = [options.train().best_mean_accepted for options in (whole, part)]
    assert accepted[1] < accepted[0]  # most of what the target says cannot be proposed
    assert "draft_vocab" not in DrafterConfig.read(whole.export_dir).shape
    config = DrafterConfig.read(part.export_dir)
    assert config.size("draft_vocab") == 9
    ids = load_tensor(part.export_dir, "token_map")
    assert ids.tolist() == sorted(set(ids.tolist()))
    again = part.replace(num_steps=3, draft_vocab=7)  # a run that goes on keeps its map
    again.train()
    assert torch.equal(load_tensor(part.export_dir, "token_map"), ids)


@pytest.mark.parametrize("method", ["eagle1", "eagle2"])
def test_stopped_and_resumed_equals_uninterrupted(
    method: str, target_dir: Path, text_dir: Path, heldout_dir: Path, tmp_path: Path
) -> None:
    changes: dict[str, object] = {"method": method, "token_rows": 40, "optimizer": "muon"}
    whole = _options(target_dir, text_dir, heldout_dir, tmp_path / "whole", **changes)
    whole.train()
    parts = _options(target_dir, text_dir, heldout_dir, tmp_path / "parts", **changes)
    assert parts.train(stop_after=5).step == 5
    torch.rand(7)  # whatever else drew in between
    assert parts.train().step == 12
    first, second = _newest(whole.run_dir), _newest(parts.run_dir)
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert DrafterConfig.read(parts.export_dir).method == method


def test_training_from_anywhere_raises_heldout_acceptance(
    target_dir: Path, text_dir: Path, heldout_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a map of noise: the fitted one leaves little to learn on so small a target."""
    fit = eagle1_start.fit_next_feature

    def spoiled(*args: Any) -> eagle1_start.Eagle1Start:
        start = fit(*args)
        noise = torch.randn(start.weight.shape, generator=torch.Generator().manual_seed(1))
        return eagle1_start.Eagle1Start(0.05 * noise, start.constant, start.level)

    changes: dict[str, object] = {
        "method": "eagle1", "num_steps": 60, "eval_every": 60, "checkpoint_every": 60, "learning_rate": 3e-3
    }  # fmt: skip
    options = _options(target_dir, text_dir, heldout_dir, tmp_path / "spoiled", **changes)
    fitted = _acceptance(_options(target_dir, text_dir, heldout_dir, tmp_path / "fitted", **changes), None)
    monkeypatch.setattr("paceline.methods.eagle.feature_training.fit_next_feature", spoiled)
    untrained = _acceptance(options, None)
    trained = options.train().best_mean_accepted
    assert untrained + 0.2 < trained
    assert untrained + 0.2 < fitted


def test_gradients_are_cut_where_the_method_says(
    target_dir: Path, text_dir: Path, heldout_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []
    clip = nn.utils.clip_grad_value_
    monkeypatch.setattr(
        nn.utils, "clip_grad_value_", lambda p, limit: (limits.append(limit), clip(p, limit))[1]
    )
    for method, value, expected in (("eagle1", None, [0.5]), ("eagle1", 0.25, [0.25]), ("eagle3", None, [])):
        options = _options(
            target_dir, text_dir, heldout_dir, tmp_path / str(value) / method,
            method=method, num_steps=1, clip_value=value,
        )  # fmt: skip
        options.train()
        assert limits == expected
        limits.clear()


@pytest.mark.parametrize(
    ("field", "value"),
    [("clip_value", -0.5), ("token_rows", -1), ("feature_noise", -0.1), ("token_weight", float("nan"))],
)
def test_bad_options_are_named(
    field: str, value: float, target_dir: Path, text_dir: Path, heldout_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(TrainingDataError, match=field):
        _options(target_dir, text_dir, heldout_dir, tmp_path, method="eagle1", **{field: value}).train()


def test_text_without_features_is_refused(text_dir: Path) -> None:
    corpus = Corpus(text_dir, 288, 1, with_features=False)
    batch = next(corpus.batches(DataPosition()))
    assert shard_indices(text_dir)
    with pytest.raises(TrainingDataError, match="no features"):
        objective().loss(batch)
