"""P-EAGLE's rows, their attention, segments with the whole's gradients, and acceptance as it is served."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.methods.drafter import DraftRequest
from paceline.methods.loading import load_drafter
from paceline.methods.one_pass.rows import FlatRows, owners, sample_rows, segments
from paceline.methods.p_eagle.objective import PEagleObjective, PEagleShape
from paceline.training.attention import Pattern
from paceline.training.data import Batch, Corpus, DataPosition
from paceline.training.draft_vocabulary import rarest_token
from paceline.training.objective import TargetReference
from tests.training.training_run import TrainingRun

VOCAB = 41
SHAPE = PEagleShape(
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
    num_depths=5,
    mask_token=7,
)


def _visible(rows: Tensor) -> list[list[bool]]:
    """The published rule, word for word: a context row at or before my anchor, or one of my chain not deeper than I."""
    out = []
    for query_anchor, query_depth in rows.T.tolist():
        line = []
        for key_anchor, key_depth in rows.T.tolist():
            is_context = key_depth == 0 and key_anchor <= query_anchor
            is_chain = key_anchor == query_anchor and key_depth <= query_depth
            line.append(is_context or is_chain)
        out.append(line)
    return out


def _seen(pattern: Pattern, text: int, row: int) -> list[int]:
    """Rows that a pattern lets a row see."""
    shared = (pattern.bias[text, row] == 0).nonzero().flatten().tolist()
    chain = [
        int(one.rows[text, row - one.first])
        for one in pattern.chains
        if row >= one.first and one.bias[text, row - one.first] == 0
    ]
    return shared + chain


def test_attention_is_the_published_rule() -> None:
    torch.manual_seed(2)
    for length in (6, 13, 30):
        rows = sample_rows(torch.rand(length) < 0.8, 5, 0.7, 0.0)
        is_own = torch.ones(rows.shape[1], dtype=torch.bool)
        pattern = FlatRows.pad([rows], [is_own]).pattern(torch.float32)
        for row, line in enumerate(_visible(rows)):
            assert sorted(_seen(pattern, 0, row)) == [i for i, is_seen in enumerate(line) if is_seen]


def test_a_kept_row_has_its_whole_chain_and_a_target() -> None:
    torch.manual_seed(3)
    in_loss = torch.rand(400) < 0.9
    in_loss[0] = True
    anchor, depth = sample_rows(in_loss, 8, 0.7, 0.0)
    kept = set(zip(anchor.tolist(), depth.tolist(), strict=True))
    assert len(kept) == anchor.numel()
    assert {(a, 0) for a in range(400)} <= kept
    for a, d in kept:
        if d > 0:
            assert (a, d - 1) in kept
            assert a + d > 0
            assert in_loss[a + d]
    assert int(depth.max()) == 7


@pytest.mark.parametrize(("floor", "shares"), [(0.0, [0.7**d for d in range(8)]), (0.2, None)])
def test_rows_thin_out_by_the_ratio(floor: float, shares: list[float] | None) -> None:
    torch.manual_seed(4)
    _, depth = sample_rows(torch.ones(2000, dtype=torch.bool), 8, 0.7, floor)
    counts = torch.bincount(depth, minlength=8) / 2000
    expected = shares or [max(0.7**d, 0.2) for d in range(8)]
    # The candidates of the last depths may be fewer than their share: successors of what was kept.
    torch.testing.assert_close(counts, torch.tensor(expected), rtol=0.02, atol=0.01)
    if shares:
        assert depth.numel() == pytest.approx(2000 * (1 - 0.7**8) / 0.3, rel=0.02)


def test_text_without_targets_keeps_true_rows_only() -> None:
    anchor, depth = sample_rows(torch.zeros(9, dtype=torch.bool), 8, 0.7, 0.0)
    assert anchor.tolist() == list(range(9))
    assert not depth.any()


def test_segments_own_every_row_once_and_see_what_they_need() -> None:
    torch.manual_seed(5)
    rows = [sample_rows(torch.rand(n) < 0.9, 5, 0.7, 0.0) for n in (23, 40)]
    parts = segments(rows, [23, 40], 3)
    for text, length in enumerate((23, 40)):
        assert owners(rows[text], length, 3).tolist() == [
            min(2, (a + (d > 0)) * 3 // length) for a, d in rows[text].T.tolist()
        ]
        owned = [
            pair
            for part in parts
            for pair, own in zip(
                zip(part.anchors[text].tolist(), part.depths[text].tolist(), strict=True),
                part.is_own[text].tolist(),
                strict=True,
            )
            if own
        ]
        assert sorted(owned) == sorted(map(tuple, rows[text].T.tolist()))
        whole = {tuple(p): set() for p in rows[text].T.tolist()}
        for i, seen in enumerate(_visible(rows[text])):
            whole[tuple(rows[text].T[i].tolist())] = {
                tuple(rows[text].T[j].tolist()) for j, is_seen in enumerate(seen) if is_seen
            }
        for part in parts:
            pattern = part.pattern(torch.float32)
            pairs = list(zip(part.anchors[text].tolist(), part.depths[text].tolist(), strict=True))
            for i in part.is_own[text].nonzero().flatten().tolist():
                seen = _seen(pattern, text, i)
                assert {pairs[j] for j in seen} == whole[pairs[i]]
                assert len(seen) == len(whole[pairs[i]])


def _random_objective(dtype: torch.dtype, num_segments: int = 1) -> PEagleObjective:
    random = torch.Generator().manual_seed(1)
    parameters = {
        name: 1.0 + 0.1 * torch.randn(size, generator=random)
        if len(size) == 1
        else torch.randn(size, generator=random) * size[-1] ** -0.5
        for name, size in SHAPE.parameter_shapes().items()
    }
    head = torch.randn(VOCAB, 16, generator=random)
    ids = torch.arange(3, 33)
    target = TargetReference("", "tiny", (0, 1), 64)
    return PEagleObjective(
        SHAPE, parameters, head, ids, torch.full((32,), 2.0), target, num_segments=num_segments, dtype=dtype
    )


def _random_batch() -> Batch:
    random = torch.Generator().manual_seed(6)
    lengths = torch.tensor([31, 24, 9])
    tokens = torch.randint(0, VOCAB, (3, 31), generator=random)
    top = torch.randint(0, VOCAB, (3, 31), generator=random)
    inside = torch.arange(31)[None] < lengths[:, None]
    answer = (torch.arange(31)[None] > 4) & inside
    return Batch(
        tokens.where(inside, 0),
        top.where(inside, -1),
        answer,
        torch.ones(3, dtype=torch.bool),
        lengths,
        torch.randn(3, 31, 32, generator=random) * inside[..., None],
        torch.randn(3, 31, 16, generator=random) * inside[..., None],
    )


@pytest.mark.parametrize("num_segments", [2, 5])
def test_gradients_of_segments_add_up_to_the_wholes(num_segments: int) -> None:
    objective, batch = _random_objective(torch.float64), _random_batch()
    torch.manual_seed(8)
    rows = objective.sample(batch)
    gradients, losses = [], []
    for count in (1, num_segments):
        parts = segments(rows, batch.lengths.tolist(), count)
        leaves = {k: p.detach().double().requires_grad_() for k, p in objective.named_parameters().items()}
        total = objective.count(batch, parts)
        assert total > 60
        loss = 0.0
        for part in parts:
            value = objective.part_loss(leaves, batch, part, total, {})
            value.backward()
            loss += float(value.detach())
        losses.append(loss)
        gradients.append({k: leaf.grad for k, leaf in leaves.items()})
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    for name, whole in gradients[0].items():
        assert whole is not None
        assert whole.abs().max() > 0
        torch.testing.assert_close(gradients[1][name], whole, rtol=1e-9, atol=1e-12)


def test_the_trainers_loss_is_the_same_in_segments() -> None:
    batch, results = _random_batch(), []
    for num_segments in (1, 4):
        objective = _random_objective(torch.float32, num_segments)
        torch.manual_seed(8)
        loss, metrics = objective.loss(batch)
        (2.0 * loss).backward()
        results.append(
            (float(loss.detach()), metrics, {k: p.grad for k, p in objective.named_parameters().items()})
        )
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-4)
    assert sum(results[0][1].values()) == pytest.approx(results[0][0], rel=1e-5)
    for name, gradient in results[0][2].items():
        torch.testing.assert_close(results[1][2][name], gradient, rtol=1e-3, atol=1e-5)


def test_loss_is_the_mean_cross_entropy_of_rows_with_a_target() -> None:
    """Row by row, with one row of logits at a time; padding, prompts and words that cannot be drafted count nothing."""
    objective, batch = _random_objective(torch.float64), _random_batch()
    torch.manual_seed(9)
    rows = objective.sample(batch)
    (part,) = segments(rows, batch.lengths.tolist(), 1)
    leaves = {k: p.detach().double() for k, p in objective.named_parameters().items()}
    out = objective.forward(leaves, batch, part)
    assert batch.hidden is not None
    terms = []
    for text, pairs in enumerate(rows):
        for i, (anchor, depth) in enumerate(pairs.T.tolist()):
            at = anchor + depth + 1  # the target chooses the proposed token here
            if at + 1 >= int(batch.lengths[text]) or not batch.is_answer[text, at + 1]:
                continue
            if int(batch.top_tokens[text, at]) not in range(3, 33):
                continue
            head = objective._whole_head[3:33].double()
            probs = (batch.hidden[text, at].double() @ head.T).softmax(-1)
            log_probs = (out[text, i] @ leaves["lm_head.weight"].T).log_softmax(-1)
            terms.append(-float((probs * log_probs).sum()))
    loss = objective.part_loss(leaves, batch, part, objective.count(batch, [part]), {})
    assert len(terms) == objective.count(batch, [part])
    assert float(loss) == pytest.approx(sum(terms) / len(terms), rel=1e-9)


def test_heldout_acceptance_is_what_serving_would_have_had_accepted(
    target_dir: Path, text_dir: Path, heldout_dir: Path, tmp_path: Path
) -> None:
    options = TrainingRun(
        "p_eagle", target_dir, text_dir, heldout_dir, tmp_path, tmp_path, draft_vocab=128, num_layers=2,
        num_depths=6, dtype="float32", batch_tokens=288,
    )  # fmt: skip
    objective = options.objective(Corpus(text_dir, 288, 1))
    assert isinstance(objective, PEagleObjective)
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
    assert accepted[0] > 0
    assert tuple(accepted) == counts.accepted


def test_the_mask_borrows_a_token_that_nobody_uses() -> None:
    embedding = torch.tensor([[3.0, 0.0], [0.5, 0.0], [1.0, 0.0], [0.2, 0.0]])
    assert rarest_token(torch.tensor([0, 0, 0, 4]), embedding) == 1
    assert rarest_token(torch.tensor([2, 7, 9, 4]), embedding) == 0
