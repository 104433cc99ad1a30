"""DSpark's loss spelled out row by row, for each kind of Markov head, and acceptance as it is served."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from paceline.methods.block_diffusion.start import random_parameters
from paceline.methods.checkpoint import DrafterConfig
from paceline.methods.drafter import DraftRequest
from paceline.methods.dspark.heads import HeadPlan, MarkovHead
from paceline.methods.dspark.objective import DSparkObjective, LossWeights
from paceline.methods.dspark.temperatures import fit_temperatures, path_errors
from paceline.methods.loading import load_drafter
from paceline.training.data import Corpus, DataPosition
from paceline.training.objective import TargetReference
from tests.training.test_dflash import DRAFTABLE, SHAPE, VOCAB, random_batch
from tests.training.training_run import TrainingRun

RANK = 4
BLOCK = replace(SHAPE, anchor_first=True)
PLANS = {
    "vanilla": HeadPlan(MarkovHead.VANILLA, RANK),
    "gated": HeadPlan(MarkovHead.GATED, RANK),
    "rnn": HeadPlan(MarkovHead.RNN, RANK),
    "confidence of the row alone": HeadPlan(MarkovHead.VANILLA, RANK, confidence_reads_token=False),
    "no confidence": HeadPlan(MarkovHead.VANILLA, RANK, has_confidence=False),
}


def random_objective(plan: HeadPlan, dtype: torch.dtype = torch.float64) -> DSparkObjective:
    random = torch.Generator().manual_seed(1)
    shapes = {**BLOCK.parameter_shapes(), **plan.parameter_shapes(16, VOCAB, 30)}
    parameters = random_parameters(shapes, 3)
    for name in plan.parameter_shapes(16, VOCAB, 30):  # heads that count
        parameters[name] = torch.randn(parameters[name].shape, generator=random)
    embedding, head = torch.randn(2, VOCAB, 16, generator=random)
    return DSparkObjective(
        BLOCK, plan, parameters, embedding, head, torch.tensor(DRAFTABLE), torch.full((32,), 2.0),
        TargetReference("", "tiny", (0, 1), 64), num_anchors=6, decay=3.0, loss_weights=LossWeights(0.2, 0.7, 1.5),
        dtype=dtype,
    )  # fmt: skip


@pytest.mark.parametrize("kind", PLANS)
def test_loss_is_the_published_sum(kind: str) -> None:
    """As the paper writes it: one row at a time, with the text's own token before it."""
    plan = PLANS[kind]
    objective, batch = random_objective(plan), random_batch()
    torch.manual_seed(9)
    blocks = objective.sample(batch)
    w = {k: p.detach().double() for k, p in objective.named_parameters().items()}
    out = objective.forward(w, batch, blocks.anchors)
    head = objective._whole_head[3:33].double()
    w1, w2 = w["markov_head.markov_w1.weight"], w["markov_head.markov_w2.weight"]
    assert batch.hidden is not None
    total = counted = 0.0
    for text, block in blocks.weights.any(-1).nonzero().tolist():
        anchor = int(blocks.anchors[text, block])
        s = torch.zeros(RANK, dtype=torch.float64)
        for k in range(5):
            h, at = out[text, block, k], min(anchor + k, 30)
            x = w1[int(batch.tokens[text, at])]
            m = x
            if kind == "gated":
                gate = w["markov_head.gate_proj.weight"] @ torch.cat([h, x])
                m = torch.sigmoid(gate + w["markov_head.gate_proj.bias"]) * x
            if kind == "rnn":
                z = w["markov_head.joint_proj.weight"] @ torch.cat([s, x, h])
                g, c, o = (z + w["markov_head.joint_proj.bias"]).split(RANK)
                s = torch.sigmoid(g) * s + (1 - torch.sigmoid(g)) * torch.tanh(c)
                m = torch.tanh(o)
            weight = float(blocks.weights[text, block, k])
            if not weight:
                continue
            draft_probs = (head @ h + w2 @ m).softmax(-1)
            target_probs = (head @ batch.hidden[text, at].double()).softmax(-1)
            distance = float((draft_probs - target_probs).abs().sum())
            label = int(batch.tokens[text, at + 1]) - 3
            total += weight * (-0.2 * float(draft_probs[label].log()) + 0.7 * distance)
            if plan.has_confidence:
                read = torch.cat([h, x]) if plan.confidence_reads_token else h
                logit = w["confidence_head.proj.weight"][0] @ read + w["confidence_head.proj.bias"][0]
                accepted = 1 - distance / 2
                total -= 1.5 * weight * accepted * float(F.logsigmoid(logit))
                total -= 1.5 * weight * (1 - accepted) * float(F.logsigmoid(-logit))
            counted += weight
    loss, metrics = objective.block_loss(w, batch, blocks)
    assert counted > 10
    assert float(loss) == pytest.approx(total / counted, rel=1e-6)
    assert ("loss_confidence" in metrics) is plan.has_confidence


@pytest.mark.parametrize("kind", PLANS)
def test_every_parameter_learns(kind: str) -> None:
    objective, batch = random_objective(PLANS[kind], torch.float32), random_batch()
    torch.manual_seed(9)
    loss, _ = objective.loss(batch)
    loss.backward()
    for name, parameter in objective.named_parameters().items():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_confidence_does_not_teach_the_distance() -> None:
    """The label of the confidence head is a number: only its own error reaches the layers through it."""
    objective, batch = random_objective(PLANS["vanilla"], torch.float32), random_batch()
    objective.loss_weights = LossWeights(0.0, 0.0, 1.0)
    torch.manual_seed(9)
    loss, _ = objective.loss(batch)
    loss.backward()
    bias = objective.named_parameters()["markov_head.markov_w2.weight"].grad
    assert bias is None or bias.abs().max() == 0
    confidence = objective.named_parameters()["confidence_head.proj.weight"].grad
    assert confidence is not None
    assert confidence.abs().max() > 0


@pytest.mark.parametrize("markov_head", ["vanilla", "gated", "rnn"])
def test_heldout_acceptance_is_what_serving_would_have_had_accepted(
    markov_head: str, target_dir: Path, text_dir: Path, heldout_dir: Path, tmp_path: Path
) -> None:
    options = TrainingRun(
        "dspark", target_dir, text_dir, heldout_dir, tmp_path, tmp_path, draft_vocab=128, num_layers=2,
        block_size=6, markov_head=markov_head, markov_rank=8, dtype="float32", batch_tokens=288,
    )  # fmt: skip
    objective = options.objective(Corpus(text_dir, 288, 1))
    assert isinstance(objective, DSparkObjective)
    assert objective.shape.anchor_first
    objective.set_constants({**objective.constants(), "tap_scale": torch.ones(192)})
    with torch.no_grad():
        for name, parameter in objective.named_parameters().items():
            if name.startswith("markov_head"):
                parameter.copy_(torch.randn_like(parameter) * 0.5)
            parameter.copy_(parameter.bfloat16())  # exact in the export
    objective.export(tmp_path, {})
    drafter = load_drafter(tmp_path, target_dir, dtype=torch.float32)
    batch = next(Corpus(heldout_dir, 288, 1, greedy_only=True).batches(DataPosition()))
    counts = objective.evaluate(batch)
    assert batch.taps is not None
    fc = objective.named_parameters()["fc.weight"].detach()
    accepted, reached = [0] * 5, 0
    for text, length in enumerate(batch.lengths.tolist()):
        tokens = batch.tokens[text, :length].tolist()
        fused = F.linear(batch.taps[text, :length].float(), fc)
        for root in range(1, length - 5):
            if not bool(batch.is_answer[text, root + 1 : root + 6].all()):
                continue
            drafter.open(1, tokens[: root + 1])
            drafter.feed(1, 0, fused[:root])
            (entry,) = drafter.draft([DraftRequest(1, 5)])
            assert entry is not None
            reached += 1
            for depth, token in enumerate(entry.tokens):
                if token != tokens[root + 1 + depth]:
                    break
                accepted[depth] += 1
    assert reached == counts.reached[0] > 20
    assert tuple(accepted) == counts.accepted
    # What was evaluated is what temperatures are fitted on, and what a step of training makes void.
    objective.export(tmp_path, {})
    config = DrafterConfig.read(tmp_path)
    assert len(config.shape["confidence_temperatures"]) == 5
    raw, scaled = (config.training[f"heldout_path_error_{x}"] for x in ("raw", "scaled"))
    half = reached // 2  # what they are judged on was not fitted on
    odds, is_right = (torch.cat(parts) for parts in zip(*objective._held_out, strict=True))
    assert raw == [round(x, 4) for x in path_errors(odds[:half], is_right[:half], [1.0] * 5)]
    own = config.shape["confidence_temperatures"]
    assert own == [round(x, 4) for x in fit_temperatures(odds[half:], is_right[half:])]
    assert scaled == [round(x, 4) for x in path_errors(odds[:half], is_right[:half], own)]
    scaled_drafter = load_drafter(tmp_path, target_dir, dtype=torch.float32)
    scaled_drafter.open(1, tokens[:6])
    scaled_drafter.feed(1, 0, fused[:5])
    drafter.open(1, tokens[:6])
    drafter.feed(1, 0, fused[:5])
    (one,), (other,) = (d.draft([DraftRequest(1, 5)]) for d in (drafter, scaled_drafter))
    assert one is not None
    assert other is not None
    assert one.tokens == other.tokens
    for before, after, temperature in zip(
        one.log_probs, other.log_probs, config.shape["confidence_temperatures"], strict=True
    ):
        odds = before - math.log(-math.expm1(before))
        assert after == pytest.approx(float(F.logsigmoid(torch.tensor(odds / temperature))), abs=1e-3)
    objective.loss(next(Corpus(text_dir, 288, 1).batches(DataPosition())))
    objective.export(tmp_path, {})
    assert "confidence_temperatures" not in DrafterConfig.read(tmp_path).shape
