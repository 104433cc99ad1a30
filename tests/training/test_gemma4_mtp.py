"""Gemma 4's assistant in training: equal to serving, learns, resumes exactly, and its tokens fall into clusters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig

from paceline.contract.errors import TrainingDataError
from paceline.methods.checkpoint import DrafterConfig, save_drafter
from paceline.methods.drafter import DraftRequest
from paceline.methods.gemma4_mtp import objective as gemma4_mtp
from paceline.methods.gemma4_mtp import start as gemma4_mtp_start
from paceline.methods.gemma4_mtp.model import FULL, SLIDING
from paceline.methods.gemma4_mtp.objective import Gemma4MtpObjective, TargetTables
from paceline.methods.gemma4_mtp.token_clusters import cluster_tokens, fit_centroids
from paceline.methods.loading import load_drafter
from paceline.target import SequenceRows, TapSpec, TargetEngine
from paceline.training.data import Batch
from paceline.training.objective import TargetReference
from paceline.training.target_rows import TargetRows
from paceline.training.target_weights import read_weights
from tests.methods.conftest import text
from tests.methods.gemma4_checkpoint import save_gemma3
from tests.training.test_trainer import _acceptance, _newest, _options

SMALL = {"method": "gemma4_mtp", "draft_hidden": 24, "draft_intermediate": 48, "token_rows": 60}


@pytest.fixture(scope="module")
def gemma_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gemma3(tmp_path_factory.mktemp("gemma3"))


def objective(model_dir: Path, **changes: Any) -> Gemma4MtpObjective:
    """Random parameters behind a target, in float32."""
    config = AutoConfig.from_pretrained(model_dir)
    shape, cached = gemma4_mtp_start.default_shape(config, 3, 24, 48)
    assert shape.layer_types == (SLIDING, SLIDING, FULL)
    random = torch.Generator().manual_seed(8)
    parameters = {
        name: 1.0 + 0.2 * torch.randn(size, generator=random)
        if len(size) == 1
        else torch.randn(size, generator=random) * 1.5 * size[1] ** -0.5
        for name, size in shape.parameter_shapes().items()
    }
    embedding = read_weights(model_dir)["model.embed_tokens.weight"]
    rows = TargetRows(model_dir, TapSpec(norm_final=True, cached=tuple(cached.values())), torch.float32)
    tables = TargetTables(embedding, 8.0, embedding, rows)
    facts = TargetReference("*", "tiny", (), 64)
    settings: dict[str, Any] = {"dtype": torch.float32, "step_decay": 0.5, **changes}
    return Gemma4MtpObjective(shape, cached, parameters, tables, facts, **settings)


def batch_of(texts: list[list[int]]) -> Batch:
    length = max(map(len, texts))
    tokens = torch.tensor([[*one, *[0] * (length - len(one))] for one in texts])
    lengths = torch.tensor([len(one) for one in texts])
    answer = (torch.arange(length)[None] < lengths[:, None]) & (torch.arange(length)[None] >= 4)
    greedy = torch.ones(len(texts), dtype=torch.bool)
    return Batch(tokens, tokens, answer, greedy, lengths, None, None)


def log_probs(ours: Gemma4MtpObjective, outputs: Tensor) -> Tensor:
    return (outputs @ ours.named_parameters()["model.embed_tokens.weight"].T).log_softmax(-1)


@torch.no_grad()
def test_serving_equals_training(gemma_dir: Path, tmp_path: Path) -> None:
    """A draft from the middle of a text is what training computes at that row, beyond the window."""
    ours = objective(gemma_dir)
    config, tensors = ours.checkpoint({})
    save_drafter(tmp_path, config, {k: t.float() if t.is_floating_point() else t for k, t in tensors.items()})
    drafter = load_drafter(tmp_path, gemma_dir, dtype=torch.float32)
    ours = objective(gemma_dir)
    for name, parameter in ours.named_parameters().items():
        parameter.copy_(tensors[name].float())
    tokens = text(22, seed=3)
    assert drafter.tap is not None
    engine = TargetEngine.load(gemma_dir, dtype=torch.float32, taps=[drafter.tap])
    rows = engine.step([SequenceRows(engine.open(), tokens, num_logits="none")]).features[0]
    drafter.open(1, tokens)
    drafter.feed(1, 0, rows[:-1])
    (entry,) = drafter.draft([DraftRequest(1, 5)])
    assert entry is not None
    whole = batch_of([[*tokens, *entry.tokens], text(9, seed=4)])
    found = torch.stack([log_probs(ours, out[0, len(tokens) - 2]) for out in ours.outputs(whole, 5)])
    assert found.argmax(-1).tolist() == list(entry.tokens)
    assert len(set(entry.tokens)) > 1
    torch.testing.assert_close(
        found[range(5), list(entry.tokens)], torch.tensor(entry.log_probs), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_loss_is_that_of_the_formulas(gemma_dir: Path, loss: str) -> None:
    ours, batch = objective(gemma_dir, loss=loss, steps=2), batch_of([text(14, 1), text(9, 2)])
    found, shown = ours.loss(batch)
    found.backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in ours.named_parameters().values())
    head = read_weights(gemma_dir)["model.embed_tokens.weight"].float()
    with torch.no_grad():
        states = ours._rows.read(batch)[..., :64]
        expected = []
        for j, out in enumerate(ours.outputs(batch, 2)):
            losses = []
            for row in range(2):
                for r in range(batch.tokens.shape[1] - 2 - j):
                    if not batch.is_answer[row, r + 2 + j]:
                        continue
                    own = log_probs(ours, out[row, r])
                    if loss == "ce":
                        losses.append(-own[batch.tokens[row, r + 2 + j]])
                    else:
                        wanted = (head @ states[row, r + 1 + j]).log_softmax(-1)
                        losses.append((wanted.exp() * (wanted - own)).sum())
            expected.append(torch.stack(losses).mean())
    assert [shown["depth_1"], shown["depth_2"]] == pytest.approx([float(x) for x in expected], rel=1e-4)
    assert float(found.detach()) == pytest.approx(float((expected[0] + 0.5 * expected[1]) / 1.5), rel=1e-4)


def test_units_of_training_are_folded_into_what_is_served(gemma_dir: Path) -> None:
    scale = torch.linspace(0.1, 30.0, 128)
    ours, plain = objective(gemma_dir, steps=2, input_scale=scale), objective(gemma_dir, steps=2)
    batch = batch_of([text(14, 1), text(9, 2)])
    found, expected = ours.loss(batch)[0], plain.loss(batch)[0]
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    for name, tensor in plain.checkpoint({})[1].items():
        torch.testing.assert_close(ours.checkpoint({})[1][name], tensor)
    found.backward()
    expected.backward()
    for name, factor in (("pre", 1.0 / scale), ("post", scale[64:, None])):
        one, other = (x.named_parameters()[f"{name}_projection.weight"].grad for x in (ours, plain))
        assert one is not None
        assert other is not None
        torch.testing.assert_close(one, other * factor, rtol=1e-3, atol=1e-6)


def test_stopped_and_resumed_equals_uninterrupted(
    target_dir: Path, text_dir: Path, heldout_dir: Path, tmp_path: Path
) -> None:
    whole = _options(target_dir, text_dir, heldout_dir, tmp_path / "whole", **SMALL)
    whole.train()
    parts = _options(target_dir, text_dir, heldout_dir, tmp_path / "parts", **SMALL)
    assert parts.train(stop_after=5).step == 5
    torch.rand(7)  # whatever else drew in between
    assert parts.train().step == 12
    first, second = _newest(whole.run_dir), _newest(parts.run_dir)
    assert all(torch.equal(first[k], second[k]) for k in first)


def test_training_from_anywhere_raises_acceptance_and_what_it_writes_drafts(
    target_dir: Path, text_dir: Path, heldout_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the exported head in clusters; from a map of noise, as the fitted one leaves little to learn here."""
    changes = {**SMALL, "num_steps": 25, "eval_every": 25, "checkpoint_every": 25, "learning_rate": 5e-3}
    changes |= {"head_learning_rate": 5e-3, "num_clusters": 7, "num_selected": 3}
    options = _options(target_dir, text_dir, heldout_dir, tmp_path / "spoiled", **changes)
    fitted = _acceptance(_options(target_dir, text_dir, heldout_dir, tmp_path / "fitted", **changes), None)
    start = gemma4_mtp_start.starting_parameters

    def spoiled(*arguments: Any) -> tuple[dict[str, Tensor], Tensor]:
        parameters, scale = start(*arguments)
        noise = torch.randn(24, 128, generator=torch.Generator().manual_seed(1)) * 0.1
        return parameters | {"pre_projection.weight": noise}, scale

    monkeypatch.setattr("paceline.methods.gemma4_mtp.recipe.starting_parameters", spoiled)
    untrained = _acceptance(options, None)
    trained = options.train().best_mean_accepted
    assert untrained + 0.1 < trained
    assert untrained + 0.1 < fitted
    assert DrafterConfig.read(options.export_dir).shape["num_clusters"] == 7
    drafter = load_drafter(options.export_dir, target_dir, dtype=torch.float32)
    drafter.open(1, list(range(5, 12)))
    assert drafter.tap is not None
    drafter.feed(1, 0, torch.randn(6, drafter.tap.width(64)))
    (entry,) = drafter.draft([DraftRequest(1, 6)])
    assert entry is not None
    assert len(entry.tokens) == 6


def test_tokens_fall_into_clusters_of_one_size_by_their_rows() -> None:
    random = torch.Generator().manual_seed(5)
    middles = torch.randn(6, 8, generator=random) * 5.0
    owners = torch.randperm(60, generator=random) % 6
    table = middles[owners] + 0.1 * torch.randn(60, 8, generator=random)
    centroids, order = cluster_tokens(table, 6, seed=1)
    assert order.sort().values.tolist() == list(range(60))
    pure = sum(len(set(owners[members].tolist())) == 1 for members in order.view(6, 10))
    assert pure >= 4
    torch.testing.assert_close(centroids, torch.stack([table[m].mean(0) for m in order.view(6, 10)]))
    with pytest.raises(TrainingDataError, match="num_clusters 7 must divide 60"):
        cluster_tokens(table, 7)


def test_fitted_centroids_find_the_cluster_of_the_likeliest_token() -> None:
    """On states of other texts, where one token of a cluster stands out and its mean does not."""
    random = torch.Generator().manual_seed(5)
    table = torch.randn(240, 16, generator=random)
    means, order = cluster_tokens(table, 24)
    states, others = torch.randn(2, 2000, 16, generator=random) + torch.randn(16, generator=random)
    owner = torch.empty(240, dtype=torch.int64)
    owner[order] = torch.arange(240) // 10
    likeliest = owner[(others @ table.T).argmax(-1)]

    def share(centroids: Tensor) -> float:
        best = (others @ centroids.T).topk(4, dim=-1).indices
        return float((best == likeliest[:, None]).any(-1).float().mean())

    fitted = fit_centroids(states, table, order, 24)
    assert fitted.shape == means.shape
    assert share(fitted) > share(means) + 0.05
    # Of one token a cluster there is nothing to foretell: its row is the answer.
    torch.testing.assert_close(
        fit_centroids(states, table[:24], torch.arange(24), 24), table[:24], rtol=0.02, atol=0.02
    )
    assert fit_centroids(torch.zeros(3, 16), table, order, 24).isfinite().all()


def test_a_run_keeps_the_newest_states_that_its_head_read(
    target_dir: Path, text_dir: Path, heldout_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Tensor] = []

    def watched(states: Tensor, *others: Any) -> Tensor:
        found.append(states)
        return fit_centroids(states, *others)

    monkeypatch.setattr(gemma4_mtp, "_CENTROID_STATES", 100)
    monkeypatch.setattr(gemma4_mtp, "fit_centroids", watched)
    changes = {**SMALL, "num_steps": 3, "eval_every": 3, "num_clusters": 7, "num_selected": 3}
    options = _options(target_dir, text_dir, heldout_dir, tmp_path, **changes)
    options.train()
    assert found[-1].shape == (100, 24)
    load_drafter(options.export_dir, target_dir, dtype=torch.float32)


def test_sizes_follow_the_target(gemma_dir: Path, target_dir: Path) -> None:
    shape, cached = gemma4_mtp_start.default_shape(AutoConfig.from_pretrained(gemma_dir), 4, 32, 64)
    assert shape.layer_types == (SLIDING, SLIDING, SLIDING, FULL)
    assert {kind: one.layer for kind, one in cached.items()} == {SLIDING: 4, FULL: 3}
    assert cached[SLIDING].window == 8
    shape, cached = gemma4_mtp_start.default_shape(AutoConfig.from_pretrained(target_dir), 2, 32, 64)
    assert shape.layer_types == (FULL, FULL)
    assert cached[FULL].layer == 3


def test_the_fitted_map_is_the_best_of_its_width() -> None:
    """`head @ back @ into` loses least over the states, and with all dimensions nothing."""
    random = torch.Generator().manual_seed(2)
    head, states = torch.randn(50, 12, generator=random), torch.randn(300, 12, generator=random)
    states *= torch.linspace(0.1, 2.0, 12)
    into, back = gemma4_mtp_start._main_directions(head, states, 12)
    torch.testing.assert_close(back @ into, torch.eye(12), rtol=1e-3, atol=1e-3)
    into, back = gemma4_mtp_start._main_directions(head, states, 5)
    logits = states @ head.T
    ours = F.mse_loss(states @ into.T @ back.T @ head.T, logits)
    left, singular, right = torch.linalg.svd(logits, full_matrices=False)
    best = F.mse_loss(left[:, :5] * singular[:5] @ right[:5], logits)
    assert float(ours) == pytest.approx(float(best), rel=1e-3)


def test_bad_options_are_named(target_dir: Path, text_dir: Path, heldout_dir: Path, tmp_path: Path) -> None:
    options = _options(target_dir, text_dir, heldout_dir, tmp_path, **SMALL)
    for field in ("draft_hidden", "num_selected"):
        with pytest.raises(TrainingDataError, match=field):
            options.replace(**{field: 0}).train()
    with pytest.raises(TrainingDataError, match="num_clusters"):
        options.replace(num_clusters=-1).train()


@pytest.mark.parametrize(
    ("num_clusters", "num_selected", "message"),
    [
        (9, 3, r"num_clusters 9 must divide \d+ tokens: take \d+ or \d+, or 0 for a dense head"),
        (7, 8, "num_selected 8 must be at most num_clusters 7"),
    ],
)
def test_a_head_that_cannot_be_exported_is_refused_before_training(
    num_clusters: int,
    num_selected: int,
    message: str,
    target_dir: Path,
    text_dir: Path,
    heldout_dir: Path,
    tmp_path: Path,
) -> None:
    changes = {**SMALL, "num_clusters": num_clusters, "num_selected": num_selected}
    options = _options(target_dir, text_dir, heldout_dir, tmp_path, **changes)
    with pytest.raises(TrainingDataError, match=message):
        options.train()
    assert not options.run_dir.exists()
