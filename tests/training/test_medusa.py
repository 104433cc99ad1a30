"""Medusa's objectives: what each head is asked for, where heads begin, and the pair that Medusa-2 writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from paceline.methods.checkpoint import CheckpointError
from paceline.methods.drafter import DraftRequest
from paceline.methods.loading import load_drafter
from paceline.methods.medusa1.objective import Medusa1Objective
from paceline.methods.medusa2.objective import JointSettings, Medusa2Objective
from paceline.methods.medusa_heads.heads import MedusaShape, OutputHead
from paceline.methods.medusa_heads.training import HeadStack, RankCounts, starting_parameters
from paceline.models import model_fingerprint
from paceline.target import SequenceRows, TargetEngine
from paceline.training.acceptance import chain_starts
from paceline.training.data import Batch, Corpus, DataPosition
from paceline.training.head import label_losses
from paceline.training.token_rows import drawn
from tests.training.training_run import TrainingRun

HIDDEN, VOCAB, LENGTH = 8, 20, 12


def _options(
    target_dir: Path, text_dir: Path, heldout_dir: Path, out: Path, **changes: object
) -> TrainingRun:
    settings: dict[str, Any] = {
        "method": "medusa2",
        "num_steps": 8,
        "batch_tokens": 288,
        "warmup_steps": 2,
        "draft_vocab": 128,
        "num_heads": 3,
        "eval_every": 4,
        "checkpoint_every": 8,
        "heads_first": 0.5,
        "lora_rank": 4,
        "dtype": "float32",
        "num_threads": 1,
        **changes,
    }
    return TrainingRun(
        model_dir=target_dir,
        data_dir=text_dir,
        heldout_dir=heldout_dir,
        run_dir=out / "run",
        export_dir=out / "drafter",
        **settings,
    )


def _stack(shape: MedusaShape, seed: int = 0) -> HeadStack:
    random = torch.Generator().manual_seed(seed)
    parameters = {k: torch.randn(v, generator=random) * 0.5 for k, v in shape.parameter_shapes().items()}
    head = torch.randn(shape.target_vocab, shape.hidden, generator=random)
    return HeadStack(shape, parameters, head, torch.arange(2, 2 + shape.draft_vocab), torch.float32)


def _batch(seed: int = 1) -> Batch:
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (2, LENGTH), generator=random)
    is_answer = torch.rand(2, LENGTH, generator=random) > 0.3
    return Batch(
        tokens=tokens,
        top_tokens=tokens.roll(-1, 1),
        is_answer=is_answer,
        is_greedy=torch.tensor([True, True]),
        lengths=torch.tensor([LENGTH, LENGTH]),
        taps=None,
        hidden=torch.randn(2, LENGTH, HIDDEN, generator=random),
    )


@pytest.mark.parametrize("output", list(OutputHead))
def test_head_k_at_row_r_is_asked_for_token_r_plus_two_plus_k(output: OutputHead) -> None:
    """Prompt tokens, tokens that cannot be drafted and the end of the text are no labels."""
    shape = MedusaShape(HIDDEN, VOCAB, VOCAB - 4, 3, output=output)
    stack, batch = _stack(shape), _batch()
    loss, metrics = stack.loss(batch.hidden, batch, decay=0.8)  # type: ignore[arg-type]
    assert batch.hidden is not None
    expected = torch.zeros(())
    for k in range(3):
        values = []
        for row in range(2):
            for r in range(LENGTH - 2 - k):
                label = int(batch.tokens[row, r + 2 + k])
                if batch.is_answer[row, r + 2 + k] and 2 <= label < VOCAB - 2:
                    logits = stack.output_weight(k) @ stack.states(batch.hidden[row, r : r + 1], k)[0]
                    values.append(F.cross_entropy(logits, torch.tensor(label - 2)))
        assert len(values) > 3
        mean = torch.stack(values).mean()
        assert metrics[f"head_{k}"] == pytest.approx(float(mean.detach()), abs=1e-4)
        expected = expected + 0.8**k * mean
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-4)
    loss.backward()
    for name, parameter in stack.parameters.items():
        assert parameter.grad is not None, name
    assert ("lm_head.weight" in stack.parameters) is (output is OutputHead.SHARED)


def test_heads_begin_as_the_lm_head() -> None:
    shape = MedusaShape(HIDDEN, VOCAB, VOCAB - 4, 2)
    head = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2))
    ids = torch.arange(4, VOCAB)
    parameters = starting_parameters(shape, head[ids], seed=1)
    assert all(not bool(parameters[f"blocks.{k}.layers.0.weight"].any()) for k in range(2))
    for name in parameters:  # the paper's start has small biases; here they would hide what is tested
        if name.endswith("bias"):
            assert 0 < float(parameters[name].abs().max()) <= HIDDEN**-0.5
            parameters[name] = torch.zeros(HIDDEN)
    stack = HeadStack(shape, parameters, head, ids, torch.float32)
    rows = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(3))
    expected = ids[(rows @ head[ids].T).argmax(-1)]
    for k in range(2):
        assert torch.equal(stack.best(rows, k)[:, 0], expected)


def test_a_fitted_start_is_better_than_the_lm_heads(
    target_dir: Path, text_dir: Path, heldout_dir: Path, tmp_path: Path
) -> None:
    losses = {}
    for start in ("target", "linear"):
        options = _options(
            target_dir, text_dir, heldout_dir, tmp_path, method="medusa1", head_start=start, draft_vocab=400
        )
        corpus = Corpus(text_dir, 288, 1)
        objective = options.objective(corpus)
        losses[start] = float(objective.loss(next(corpus.batches(DataPosition())))[0].detach())
    assert losses["linear"] < losses["target"]


def test_chains_begin_where_all_their_tokens_are_wanted() -> None:
    wanted = torch.tensor([[0, 1, 1, 1, 1, 0, 1, 1, 1]], dtype=torch.bool)
    # Row r begins a chain of tokens r + 2 and r + 3.
    assert chain_starts(wanted, 2)[0].nonzero().flatten().tolist() == [0, 1, 4, 5]
    assert not chain_starts(wanted[:, :3], 2).any()


def test_rank_counts() -> None:
    counts = RankCounts(2)
    counts.add(torch.tensor([[[1, 0], [0, 0]], [[1, 0], [0, 1]]], dtype=torch.bool))
    counts.add(torch.tensor([[[0, 1], [1, 0]], [[0, 0], [0, 0]]], dtype=torch.bool))
    assert [row[:2] for row in counts.accuracies] == [[0.5, 0.25], [0.25, 0.25]]


def test_measured_acceptance_is_what_a_served_chain_gets(
    target_dir: Path, text_dir: Path, heldout_dir: Path, tmp_path: Path
) -> None:
    options = _options(
        target_dir, text_dir, heldout_dir, tmp_path, method="medusa1", num_steps=30, learning_rate=3e-3
    )
    options.train()
    corpus = Corpus(heldout_dir, 288, 1, greedy_only=True)
    objective = options.objective(Corpus(text_dir, 288, 1))
    assert isinstance(objective, Medusa1Objective)
    drafter = load_drafter(options.export_dir, target_dir, dtype=torch.float32)
    batch = next(corpus.batches(DataPosition()))
    assert batch.hidden is not None
    saved = json.loads((options.export_dir / "config.json").read_text())
    accuracies = saved["shape"]["accuracies"]
    assert len(accuracies) == 3
    assert accuracies[0][0] == pytest.approx(
        saved["training"]["heldout_greedy_acceptance_per_depth"][0], abs=1e-3
    )
    from safetensors.torch import load_file

    with torch.no_grad():
        for name, tensor in load_file(options.export_dir / "model.safetensors").items():
            if name in objective.named_parameters():
                objective.named_parameters()[name].copy_(tensor)
    usable = chain_starts(batch.is_answer & batch.is_greedy[:, None], 3)
    accepted = []
    for row, r in usable.nonzero().tolist():
        tokens = batch.tokens[row, : r + 2].tolist()
        drafter.open(1, tokens)
        drafter.feed(1, r, batch.hidden[row, r : r + 1].float())
        (entry,) = drafter.draft([DraftRequest(1, 3)])
        assert entry is not None
        right = [t == int(batch.top_tokens[row, r + 1 + k]) for k, t in enumerate(entry.tokens)]
        accepted.append(next((k for k, ok in enumerate(right) if not ok), 3))
    counts = objective.evaluate(batch)
    assert counts.reached[0] == len(accepted) > 10
    assert counts.mean_accepted == pytest.approx(sum(accepted) / len(accepted), abs=0.02)


@pytest.mark.parametrize(
    ("schedule", "weights"),
    [("constant", [0.0, 0.2, 0.2]), ("linear", [0.0, 0.1, 0.2]), ("sine", [0.0, 0.2 * 0.5**0.5, 0.2])],
)
def test_the_weight_of_heads_follows_its_schedule(schedule: str, weights: list[float]) -> None:
    settings = JointSettings(schedule=schedule, heads_first=0.5)
    assert [settings.weight(x) for x in (0.49, 0.75, 1.0)] == pytest.approx(weights)


def test_the_joint_loss_is_the_base_and_the_heads(
    target_dir: Path, text_dir: Path, heldout_dir: Path, tmp_path: Path
) -> None:
    """With updates of zero the tuned target is the original: no divergence, and heads as on stored states."""
    corpus = Corpus(text_dir, 288, 1)
    batch = next(corpus.batches(DataPosition()))
    for base_loss in ("kl", "ce"):
        options = _options(target_dir, text_dir, heldout_dir, tmp_path, base_loss=base_loss, lora_dropout=0.0)
        objective = options.objective(corpus)
        assert isinstance(objective, Medusa2Objective)
        objective.set_progress(0.0)
        first, of_heads = objective.loss(batch)
        objective.set_progress(0.9)
        joint, metrics = objective.loss(batch)
        for name, value in of_heads.items():  # stored states are rounded to bfloat16
            assert metrics[name] == pytest.approx(value, abs=2e-2)
        expected = metrics["base"] + 0.2 * 0.8 * float(first.detach())
        assert float(joint.detach()) == pytest.approx(expected, abs=2e-2)
        if base_loss == "kl":
            assert metrics["base"] == pytest.approx(0.0, abs=1e-3)
        else:
            assert metrics["base"] > 0.5


def test_the_base_loss_of_some_rows_is_their_mean(
    target_dir: Path, text_dir: Path, heldout_dir: Path, tmp_path: Path
) -> None:
    corpus = Corpus(text_dir, 288, 1)
    batch = next(corpus.batches(DataPosition()))
    options = _options(
        target_dir, text_dir, heldout_dir, tmp_path, base_loss="ce", lora_dropout=0.0, token_rows=5
    )
    objective = options.objective(corpus)
    assert isinstance(objective, Medusa2Objective)
    objective.set_progress(0.9)
    torch.manual_seed(3)
    _, metrics = objective.loss(batch)
    torch.manual_seed(3)
    row, position = drawn(batch.is_answer[:, 1:], 5)
    assert len(set(zip(row.tolist(), position.tolist(), strict=True))) == 5
    hidden = objective.backbone.hidden(batch.tokens, is_training=False)[row, position].detach()
    losses = label_losses(hidden, objective.backbone.head, batch.tokens[row, position + 1])
    assert metrics["base"] == pytest.approx(float(losses.mean()), rel=1e-4)


def test_the_target_is_tuned_in_the_second_stage_alone_and_at_a_quarter_of_the_rate(
    target_dir: Path, text_dir: Path, heldout_dir: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    options = _options(target_dir, text_dir, heldout_dir, tmp_path, num_steps=8, heads_first=0.5)
    objective = options.objective(Corpus(text_dir, 288, 1))
    (optimizer,) = options.optimizers(objective)
    rates = {id(p): group["peak_lr"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in objective.named_parameters().items():
        head = (
            options.options.head_learning_rate
            if name.startswith("lm_head")
            else options.options.learning_rate
        )
        assert rates[id(parameter)] == (
            options.options.learning_rate / 4 if name.startswith("backbone.") else head
        )

    options.train(stop_after=4)
    newest = sorted((tmp_path / "run").glob("step-*"))[-1]
    assert not any(
        bool(v.any()) for k, v in load_file(newest / "weights.safetensors").items() if "lora_b" in k
    )
    options.train()
    newest = sorted((tmp_path / "run").glob("step-*"))[-1]
    assert all(bool(v.any()) for k, v in load_file(newest / "weights.safetensors").items() if "lora_b" in k)


def test_medusa2_writes_a_target_and_the_heads_made_for_it(
    target_dir: Path, text_dir: Path, heldout_dir: Path, tmp_path: Path
) -> None:
    # The last evaluation, the only one, is exported: whatever it is, it is the best so far.
    options = _options(
        target_dir, text_dir, heldout_dir, tmp_path, num_steps=12, eval_every=12, learning_rate=4e-3,
        max_loss_increase=1.0,
    )  # fmt: skip
    options.train()
    config = json.loads((options.export_dir / "config.json").read_text())
    tuned = options.export_dir / "target"
    assert config["method"] == "medusa2"
    assert config["target_fingerprint"] == model_fingerprint(tuned) != model_fingerprint(target_dir)
    assert config["training"]["original_fingerprint"] == model_fingerprint(target_dir)
    losses = config["training"]["heldout_target_loss"]
    assert losses["bound"] == pytest.approx(losses["original"] + 1.0)
    assert losses["tuned"] <= losses["bound"]
    assert losses["tuned"] != losses["original"]
    with pytest.raises(CheckpointError, match="was made for target"):
        load_drafter(options.export_dir, target_dir)
    drafter = load_drafter(options.export_dir, tuned, dtype=torch.float32)
    assert drafter.tap is not None
    engine = TargetEngine.load(tuned, dtype=torch.float32, taps=[drafter.tap])
    step = engine.step([SequenceRows(engine.open(), [5, 6, 7, 8], num_logits="none")])
    drafter.open(1, [5, 6, 7, 8])
    drafter.feed(1, 0, step.features[0][:3])
    (entry,) = drafter.draft([DraftRequest(1, 3)])
    assert entry is not None
    assert len(entry.tokens) == 3


def test_a_target_that_got_worse_is_not_exported(
    target_dir: Path, text_dir: Path, heldout_dir: Path, tmp_path: Path
) -> None:
    options = _options(target_dir, text_dir, heldout_dir, tmp_path, max_loss_increase=-0.5)
    result = options.train()
    assert result.best_step == 0
    assert not options.export_dir.exists()
    # The same run under a bound that it keeps is exported.
    kept = options.replace(max_loss_increase=1.0, run_dir=tmp_path / "other", export_dir=tmp_path / "kept")
    assert kept.train().best_step > 0
    assert (kept.export_dir / "config.json").exists()
