"""PARD's and PARD-2's losses against plain transcriptions, and what is trained against what is served."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from paceline.methods.checkpoint import ANY_TARGET, DrafterConfig
from paceline.methods.drafter import DraftRequest
from paceline.methods.loading import load_drafter
from paceline.methods.pard.mask_token import mask_token_for
from paceline.methods.pard.objective import MASK, PardObjective
from paceline.methods.pard2.objective import Pard2Objective
from paceline.target import SequenceRows, TargetEngine
from paceline.training.data import Batch, Corpus, DataPosition
from tests.training.training_run import TrainingRun

METHODS = ["pard1", "pard2"]


def _objective(
    method: str, target_dir: Path, text_dir: Path, tmp_path: Path, **changes: object
) -> tuple[PardObjective, Batch]:
    options = TrainingRun(
        method,
        target_dir,
        text_dir,
        text_dir,
        tmp_path / "run",
        tmp_path / "drafter",
        **{
            "num_layers": 2,
            "num_depths": 5,
            "draft_vocab": 0,
            "dtype": "float32",
            "batch_tokens": 288,
            **changes,
        },  # type: ignore[arg-type]
    )
    corpus = Corpus(text_dir, options.options.batch_tokens, 1)
    objective = options.objective(corpus)
    assert isinstance(objective, PardObjective)
    return objective, next(corpus.batches(DataPosition()))


class _Plain:
    """Logits of single rows by transformers: the text up to the anchor, mask rows behind it, one causal pass."""

    def __init__(self, objective: PardObjective, batch: Batch) -> None:
        self._objective, self._batch = objective, batch
        self._model = LlamaForCausalLM(LlamaForCausalLM.config_class(**objective.config))
        state = {k: p.detach() for k, p in objective.named_parameters().items() if k.startswith("model.")}
        state["model.embed_tokens.weight"] = objective._embedding
        self._model.load_state_dict({**state, "lm_head.weight": objective._whole_head}, strict=True)

    def logits(self, text: int, anchor: int, depth: int) -> Tensor:
        objective, batch, w = self._objective, self._batch, self._objective.named_parameters()
        ids = batch.tokens[text, : anchor + 1]
        x = torch.cat([objective._embedding[ids], w[MASK].detach().expand(depth, -1)])
        if isinstance(objective, Pard2Objective):
            assert batch.taps is not None
            assert batch.hidden is not None
            states = torch.cat([batch.taps[text, :anchor], batch.hidden[text, :anchor]], dim=-1).float()
            features = states / objective._feature_scale @ w["target_proj.weight"].detach().T
            features = torch.cat([torch.zeros(1, x.shape[1]), features])
            x = x + 0.02 * torch.cat([features, features[-1:].expand(depth, -1)])
        with torch.no_grad():
            logits: Tensor = self._model(inputs_embeds=x[None]).logits[0, -1]
        return logits


def _kept(objective: PardObjective, batch: Batch) -> list[tuple[int, int, int]]:
    """The rows that a loss draws from here, as (text, anchor, depth)."""
    state = torch.get_rng_state()
    rows = objective.sample(batch)
    torch.set_rng_state(state)
    return [
        (text, int(rows.anchors[text, row]), int(rows.depths[text, row]))
        for text, row in rows.is_own.nonzero().tolist()
    ]


def test_pard1_loss_is_the_mean_cross_entropy_of_kept_rows(
    target_dir: Path, text_dir: Path, tmp_path: Path
) -> None:
    objective, batch = _objective("pard1", target_dir, text_dir, tmp_path)
    batch = _cut(batch)
    torch.manual_seed(4)
    kept = _kept(objective, batch)
    value, _ = objective.loss(batch)
    plain = _Plain(objective, batch)
    losses = []
    for text, anchor, depth in kept:
        place = anchor + depth + 1
        if place >= int(batch.lengths[text]) or int(batch.tokens[text, place]) == objective.mask_token:
            continue
        logits = plain.logits(text, anchor, depth)
        logits[objective.mask_token] = -torch.inf
        losses.append(F.cross_entropy(logits, batch.tokens[text, place]))
    assert {depth for _, _, depth in kept} == set(range(5))
    assert float(value.detach()) == pytest.approx(float(torch.stack(losses).mean()), rel=1e-4)


def test_pard2_loss_weighs_rows_by_the_targets_confidence(
    target_dir: Path, text_dir: Path, tmp_path: Path
) -> None:
    objective, batch = _objective("pard2", target_dir, text_dir, tmp_path, feature_drop=0.0)
    assert isinstance(objective, Pard2Objective)
    batch = _cut(batch)
    torch.manual_seed(4)
    kept = _kept(objective, batch)
    value, shown = objective.loss(batch)
    assert batch.hidden is not None
    head = objective._teacher_whole.float()
    target_log_probs = (batch.hidden.float() @ head.T).log_softmax(-1)
    total_ce, total_kd, total = 0.0, 0.0, 0.0
    keep = objective.draft_ids
    plain = _Plain(objective, batch)
    for text, anchor, depth in kept:
        place = anchor + depth + 1
        label = int(batch.tokens[text, place]) if place < batch.tokens.shape[1] else -1
        if label in (-1, objective.mask_token) or not bool(batch.is_answer[text, place]):
            continue
        weight = 1.0
        for s in range(1, depth + 1):  # section 5: w = prod T_{p-s}
            token = int(batch.tokens[text, place - s])
            weight *= float(target_log_probs[text, place - s - 1, token].exp())
        student = plain.logits(text, anchor, depth)[keep].log_softmax(-1)
        teacher = (batch.hidden[text, place - 1].float() @ head[keep].T).log_softmax(-1)
        total_ce -= weight * float(student[int(objective._draft_of[label])])
        total_kd += weight * float((teacher.exp() * (teacher - student)).sum())
        total += weight
    assert shown["ce"] == pytest.approx(total_ce / total, rel=1e-3)
    assert shown["kd"] == pytest.approx(total_kd / total, rel=1e-3)
    assert float(value.detach()) == pytest.approx((0.1 * total_ce + total_kd) / total, rel=1e-3)
    value.backward()
    gradient = objective.named_parameters()["target_proj.weight"].grad
    assert gradient is not None
    assert bool(gradient.any())


def test_the_gate_leaves_features_out_of_whole_texts(
    target_dir: Path, text_dir: Path, tmp_path: Path
) -> None:
    objective, batch = _objective("pard2", target_dir, text_dir, tmp_path, feature_drop=0.5)
    assert isinstance(objective, Pard2Objective)
    torch.manual_seed(1)
    gated = objective.gated(batch)
    assert gated.taps is not None
    assert batch.taps is not None
    is_left = gated.taps.flatten(1).any(-1)
    assert is_left.any()
    assert not is_left.all()
    assert torch.equal(gated.taps[is_left], batch.taps[is_left])
    rows = objective.sample(batch)
    w = objective.compute_weights()
    with torch.no_grad():
        x = torch.zeros(*rows.anchors.shape, objective.shape.hidden)
        added = objective.fuse(w, gated, rows, x).flatten(1).any(-1)
    assert torch.equal(added, is_left)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("family", "draft_vocab"), [("llama", 0), ("llama", 128), ("gemma3", 0), ("gemma3", 64)]
)
def test_what_is_exported_drafts_what_training_says(
    method: str, family: str, draft_vocab: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    target_dir: Path = request.getfixturevalue("target_dir" if family == "llama" else "gemma3_dir")
    text_dir: Path = (
        request.getfixturevalue("text_dir")
        if family == "llama"
        else request.getfixturevalue("gemma3_text_dirs")[0]
    )
    objective, batch = _objective(method, target_dir, text_dir, tmp_path, draft_vocab=draft_vocab)
    with torch.no_grad():  # what is exported is bfloat16
        for parameter in objective.named_parameters().values():
            parameter.copy_(parameter.bfloat16())
    objective.export(tmp_path / "drafter", {})
    drafter = load_drafter(tmp_path / "drafter", target_dir, dtype=torch.float32)
    assert drafter.method == method
    config = DrafterConfig.read(tmp_path / "drafter")
    assert (config.target_fingerprint == ANY_TARGET) == (method == "pard1")
    tokens = batch.tokens[0, : int(batch.lengths[0])].tolist()
    taps = [] if drafter.tap is None else [drafter.tap]
    engine = TargetEngine.load(target_dir, "cpu", torch.float32, taps=taps)
    output = engine.step([SequenceRows(engine.open(), tokens, num_logits="none")])
    weights = objective.compute_weights()
    rows = objective.sample(replace(batch, is_answer=torch.ones_like(batch.is_answer)))
    with torch.no_grad():
        out = objective.forward(weights, batch, rows)[0]
    anchor = next(
        a
        for a in rows.anchors[0].tolist()
        if a > 8 and bool(((rows.anchors[0] == a) & (rows.depths[0] == 3)).any())
    )
    trained = out[(rows.anchors[0] == anchor) & rows.is_own[0]] @ objective._head.T
    drafter.open(1, tokens[: anchor + 1])
    if drafter.tap is not None:
        drafter.feed(1, 0, output.features[0][:anchor])
    (entry,) = drafter.draft([DraftRequest(1, trained.shape[0])])
    assert entry is not None
    log_probs = trained.log_softmax(-1)
    for depth, token in enumerate(entry.tokens):
        place = int(objective._draft_of[token])
        assert float(log_probs[depth, place]) == pytest.approx(float(log_probs[depth].max()), abs=0.05)
        assert entry.log_probs[depth] == pytest.approx(float(log_probs[depth, place]), abs=0.05)


def test_the_mask_is_a_free_row_where_there_is_one(target_dir: Path) -> None:
    vocab = int(json.loads((target_dir / "config.json").read_text())["vocab_size"])
    counts = torch.ones(vocab + 2, dtype=torch.int64)
    embedding = torch.ones(vocab + 2, 4)
    assert mask_token_for(target_dir, counts, embedding) == vocab
    counts[7] = 0
    assert mask_token_for(target_dir, counts[:vocab], embedding[:vocab]) == 7


def _cut(batch: Batch) -> Batch:
    """Two short texts, for what is computed row by row."""
    length = 36
    assert batch.taps is not None
    assert batch.hidden is not None
    return Batch(
        batch.tokens[:2, :length],
        batch.top_tokens[:2, :length],
        batch.is_answer[:2, :length],
        batch.is_greedy[:2],
        batch.lengths[:2].clamp_max(length),
        batch.taps[:2, :length],
        batch.hidden[:2, :length],
    )
