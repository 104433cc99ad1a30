"""Model and modules trained together: the loss written out, gradients into the model, and a pair that agrees."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.contract.errors import TrainingDataError
from paceline.methods.deepseek_mtp.joint import JointPretraining, modules_weight
from paceline.training.sizes import ModelSizes
from tests.methods.mtp_reference import ReferenceMtp

SHAPE = ModelSizes(
    hidden=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate=48, vocab=29, rope_theta=1e4,
    rms_eps=1e-5, max_positions=64,
)  # fmt: skip


def llama(joint: JointPretraining) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=29, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.load_state_dict(joint.model_tensors(), strict=False)
    return model


def repeated(rows: int, length: int, seed: int) -> Tensor:
    """Texts that count upwards in steps of their own: the next tokens follow from the last two."""
    random = torch.Generator().manual_seed(seed)
    start, step = (
        torch.randint(0, 29, (rows, 1), generator=random),
        torch.randint(1, 4, (rows, 1), generator=random),
    )
    return (start + step * torch.arange(length)) % 29


def test_the_weight_has_two_phases() -> None:
    assert [modules_weight(f) for f in (0.0, 0.67, 0.68, 1.0)] == [0.3, 0.3, 0.1, 0.1]


def test_loss_is_the_report_s_and_reaches_the_model() -> None:
    joint, tokens, lengths = (
        JointPretraining(SHAPE, 2, seed=1),
        repeated(3, 9, seed=2),
        torch.tensor([9, 7, 5]),
    )
    loss, shown = joint.loss(tokens, lengths, 0.9)
    table = joint.named_parameters()["model.embed_tokens.weight"].detach()
    reference, model = ReferenceMtp(joint.shape, joint.module_tensors(), table, table), llama(joint)
    own: list[Tensor] = []
    depths: list[list[Tensor]] = [[], []]
    for row in range(3):
        text = tokens[row, : int(lengths[row])].tolist()
        with torch.no_grad():
            hidden = model.model(torch.tensor([text])).last_hidden_state[0]
        for i in range(len(text) - 1):
            own.append(F.cross_entropy((hidden[i] @ table.T)[None], torch.tensor([text[i + 1]])))
            for j in range(2):
                if i + 2 + j < len(text):
                    logits = reference.logits(hidden, text[: i + 2], text[i + 2 : i + 2 + j])[-1]
                    depths[j].append(F.cross_entropy(logits[None], torch.tensor([text[i + 2 + j]])))
    means = [torch.stack(part).mean() for part in depths]
    expected = torch.stack(own).mean() + 0.1 * (means[0] + means[1]) / 2
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-4)
    early, _ = joint.loss(tokens, lengths, 0.0)
    assert float((early - loss).detach()) == pytest.approx(0.2 * shown["modules"], rel=1e-4)
    (reached,) = torch.autograd.grad(
        early - loss, joint.named_parameters()["model.layers.0.mlp.up_proj.weight"]
    )
    assert float(reached.abs().max()) > 0  # by the modules alone: the model's own loss cancels


def test_both_learn() -> None:
    joint = JointPretraining(SHAPE, 2, seed=1)
    optimizer = torch.optim.AdamW(joint.named_parameters().values(), lr=5e-3)
    for step in range(60):
        tokens = repeated(16, 12, seed=step)
        loss, shown = joint.loss(tokens, torch.full((16,), 12), step / 60)
        if step == 0:
            first = shown
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert shown["own"] < first["own"] - 0.7
    assert shown["modules"] < first["modules"] - 0.7


def test_short_texts_are_refused() -> None:
    with pytest.raises(TrainingDataError, match="too short"):
        JointPretraining(SHAPE, 2, seed=1).loss(torch.zeros(1, 3, dtype=torch.int64), torch.tensor([3]), 0.0)
