"""DFlash's blocks and loss, spelled out, and acceptance as it is served."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.contract.errors import TrainingDataError
from paceline.methods.block_diffusion.blocks import can_anchor, make_blocks, sample_anchors
from paceline.methods.block_diffusion.objective import DFlashShape
from paceline.methods.block_diffusion.start import random_parameters, tap_scale
from paceline.methods.dflash.objective import DFlashObjective
from paceline.methods.drafter import DraftRequest
from paceline.methods.loading import load_drafter
from paceline.training.data import Batch, Corpus, DataPosition
from paceline.training.objective import TargetReference
from tests.training.training_run import TrainingRun

VOCAB = 41
SHAPE = DFlashShape(
    hidden=16,
    target_hidden=16,
    num_taps=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    intermediate=24,
    draft_vocab=30,
    target_vocab=VOCAB,
    rope_theta=10000.0,
    rms_eps=1e-5,
    num_layers=2,
    block_size=5,
    mask_token=7,
)
DRAFTABLE = range(3, 33)


def random_batch() -> Batch:
    random = torch.Generator().manual_seed(6)
    lengths = torch.tensor([31, 24, 9])
    tokens = torch.randint(0, VOCAB, (3, 31), generator=random)
    inside = torch.arange(31)[None] < lengths[:, None]
    answer = (torch.arange(31)[None] > 4) & inside
    answer[0, 12:15] = False  # another turn of the user's
    return Batch(
        tokens.where(inside, 0),
        torch.randint(0, VOCAB, (3, 31), generator=random).where(inside, -1),
        answer,
        torch.ones(3, dtype=torch.bool),
        lengths,
        torch.randn(3, 31, 32, generator=random) * inside[..., None],
        torch.randn(3, 31, 16, generator=random) * inside[..., None],
    )


def random_objective(shape: DFlashShape = SHAPE, dtype: torch.dtype = torch.float64) -> DFlashObjective:
    random = torch.Generator().manual_seed(1)
    parameters = random_parameters(shape.parameter_shapes(), 3)
    embedding, head = torch.randn(2, VOCAB, 16, generator=random)
    target = TargetReference("", "tiny", (0, 1), 64)
    return DFlashObjective(
        shape, parameters, embedding, head, torch.tensor(DRAFTABLE), torch.full((32,), 2.0), target,
        num_anchors=6, decay=3.0, dtype=dtype,
    )  # fmt: skip


def test_anchors_are_drawn_from_answers_that_go_on() -> None:
    torch.manual_seed(2)
    batch = random_batch()
    able = can_anchor(batch)
    for text, length in enumerate(batch.lengths.tolist()):
        expected = [
            p for p in range(1, length - 1) if batch.is_answer[text, p] and batch.is_answer[text, p + 1]
        ]
        assert able[text].nonzero().flatten().tolist() == expected
    drawn = set()
    for _ in range(40):
        anchors, real = sample_anchors(able, 6)
        assert anchors.shape == (3, 6)
        assert real.sum(1).tolist() == [6, 6, 3]  # the last text has three
        for text in range(3):
            own = anchors[text][real[text]].tolist()
            assert own == sorted(set(own))
            assert able[text, own].all()
            drawn |= {(text, p) for p in own}
    assert drawn == {tuple(pair) for pair in able.nonzero().tolist()}  # every position has its turn


def test_labels_and_weights_stop_where_the_answer_does() -> None:
    batch = random_batch()
    has_label = torch.zeros(VOCAB, dtype=torch.bool)
    has_label[torch.tensor(DRAFTABLE)] = True
    anchors = torch.tensor([[9, 20, 0], [20, 22, 6], [6, 7, 0]])
    real = torch.tensor([[True, True, False], [True, True, True], [True, True, False]])
    blocks = make_blocks(batch, anchors, real, 4, 3.0, has_label)
    some_cut = 0
    for text in range(3):
        for i, anchor in enumerate(anchors[text].tolist()):
            goes_on = bool(real[text, i])
            for k in range(4):
                at = anchor + 1 + k
                goes_on = goes_on and at < int(batch.lengths[text]) and bool(batch.is_answer[text, at])
                some_cut += bool(real[text, i]) and not goes_on
                if not goes_on:
                    assert blocks.weights[text, i, k] == 0
                    continue
                token = int(batch.tokens[text, at])
                assert int(blocks.labels[text, i, k]) == token
                assert int(blocks.places[text, i, k]) == at - 1
                expected = math.exp(-k / 3.0) if token in DRAFTABLE else 0.0
                assert float(blocks.weights[text, i, k]) == pytest.approx(expected, rel=1e-6)
    assert some_cut > 3


@pytest.mark.parametrize("anchor_first", [False, True])
def test_loss_is_the_weighted_mean_of_its_rows(anchor_first: bool) -> None:
    """Row by row, each block run alone."""
    objective, batch = random_objective(replace(SHAPE, anchor_first=anchor_first)), random_batch()
    torch.manual_seed(9)
    blocks = objective.sample(batch)
    weights = {k: p.detach().double() for k, p in objective.named_parameters().items()}
    head = objective._whole_head[3:33].double()
    total = counted = 0.0
    for text in range(3):
        alone = Batch(
            batch.tokens[text : text + 1], batch.top_tokens[text : text + 1], batch.is_answer[text : text + 1],
            batch.is_greedy[text : text + 1], batch.lengths[text : text + 1],
            None if batch.taps is None else batch.taps[text : text + 1], None,
        )  # fmt: skip
        for i, anchor in enumerate(blocks.anchors[text].tolist()):
            if not blocks.weights[text, i].any():
                continue
            out = objective.forward(weights, alone, torch.tensor([[anchor]]))[0, 0]
            assert out.shape[0] == (5 if anchor_first else 4)
            for k, weight in enumerate(blocks.weights[text, i].tolist()):
                if weight:
                    token = int(batch.tokens[text, anchor + 1 + k])
                    total -= weight * float((head @ out[k]).log_softmax(-1)[token - 3])
                    counted += weight
    loss, metrics = objective.block_loss(weights, batch, blocks)
    assert counted > 10
    assert float(loss) == pytest.approx(total / counted, rel=1e-6)
    assert len(metrics) == objective.shape.num_drafts


def test_every_parameter_learns_and_the_targets_do_not() -> None:
    objective, batch = random_objective(dtype=torch.float32), random_batch()
    torch.manual_seed(9)
    loss, _ = objective.loss(batch)
    loss.backward()
    for name, parameter in objective.named_parameters().items():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
    assert not {name for name in objective.named_parameters() if "embed" in name or "lm_head" in name}


def test_a_batch_without_anchors_has_no_loss() -> None:
    batch = replace(random_batch(), is_answer=torch.zeros(3, 31, dtype=torch.bool))
    loss, metrics = random_objective(dtype=torch.float32).loss(batch)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert not metrics


def test_parameters_of_another_shape_are_refused() -> None:
    objective = random_objective()
    parameters: dict[str, Tensor] = dict(objective.named_parameters())
    del parameters["fc.weight"]
    with pytest.raises(TrainingDataError, match=r"fc\.weight"):
        DFlashObjective(
            SHAPE, parameters, torch.zeros(VOCAB, 16), torch.zeros(VOCAB, 16), torch.tensor(DRAFTABLE),
            torch.ones(32), objective.target,
        )  # fmt: skip


def test_taps_are_scaled_to_unit_size(text_dir: Path) -> None:
    scale = tap_scale(Corpus(text_dir, 288, 1))
    batch = next(Corpus(text_dir, 288, 1).batches(DataPosition()))
    assert batch.taps is not None
    scaled = batch.taps[batch.is_answer].float() / scale
    assert float(scaled.square().mean()) == pytest.approx(1.0, rel=0.2)


@pytest.mark.parametrize("layout", ["infilling", "anchor_first"])
def test_heldout_acceptance_is_what_serving_would_have_had_accepted(
    layout: str, target_dir: Path, text_dir: Path, heldout_dir: Path, tmp_path: Path
) -> None:
    options = TrainingRun(
        "dflash", target_dir, text_dir, heldout_dir, tmp_path, tmp_path, draft_vocab=128, num_layers=2,
        block_size=6, block_layout=layout, dtype="float32", batch_tokens=288,
    )  # fmt: skip
    objective = options.objective(Corpus(text_dir, 288, 1))
    assert isinstance(objective, DFlashObjective)
    objective.set_constants({**objective.constants(), "tap_scale": torch.ones(192)})
    with torch.no_grad():
        for parameter in objective.named_parameters().values():
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
        for root in range(1, length - 5):  # the chain proposes the five tokens behind the root
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
