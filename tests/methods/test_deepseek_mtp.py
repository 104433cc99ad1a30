"""Multi-token prediction served: equal to transformers' layers put together, and to training; its taps and refusals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM

from paceline.drafts import DraftEntry
from paceline.methods.checkpoint import CheckpointError
from paceline.methods.deepseek_mtp.objective import DeepseekMtpObjective, MtpShape
from paceline.methods.drafter import Drafter, DraftRequest
from paceline.methods.loading import drafter_tap, load_drafter
from paceline.training.data import Batch
from paceline.training.objective import TargetReference
from tests.methods.conftest import MTP_SHAPE, VOCAB, Target, mtp_tensors, save_mtp, text
from tests.methods.mtp_reference import ReferenceMtp

Load = Callable[[Path], Drafter]

SHAPES = {
    f"{modules} {'normed' if normed else 'raw'}": replace(MTP_SHAPE, num_modules=modules, carries_norm=normed)
    for modules in (1, 2, 3)
    for normed in (False, True)
}


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> MtpShape:
    return SHAPES[request.param]


def embedding_of(target_dir: Path) -> Tensor:
    return load_file(target_dir / "model.safetensors")["model.embed_tokens.weight"]


def final_norms(target_dir: Path, tokens: Sequence[int]) -> Tensor:
    """The target's final-norm output at every position, `[n, hidden]`, by transformers."""
    model = LlamaForCausalLM.from_pretrained(target_dir, dtype=torch.float32)
    with torch.inference_mode():
        return model.model(torch.tensor([list(tokens)])).last_hidden_state[0].clone()


def _start(drafter: Drafter, target: Target, tokens: list[int]) -> None:
    drafter.open(1, tokens)
    drafter.feed(1, 0, target.features(drafter, tokens)[:-1])


def _draft(drafter: Drafter, num_tokens: int, max_nodes: int = 0) -> DraftEntry:
    (entry,) = drafter.draft([DraftRequest(1, num_tokens, max_nodes)])
    assert entry is not None
    entry.check(max(num_tokens, max_nodes), VOCAB)
    return entry


def reference_of(shape: MtpShape, target_dir: Path) -> ReferenceMtp:
    embedding = embedding_of(target_dir)
    return ReferenceMtp(shape, mtp_tensors(shape), embedding, embedding)


@pytest.mark.parametrize("length", [2, 3, 9, 33])
def test_chain_equals_transformers_layers(
    shape: MtpShape, target_dir: Path, target: Target, tmp_path: Path, length: int
) -> None:
    drafter = load_drafter(
        save_mtp(tmp_path, target_dir, shape, mtp_tensors(shape)), target_dir, dtype=torch.float32
    )
    tokens = text(length, seed=length)
    _start(drafter, target, tokens)
    entry = _draft(drafter, 7)
    features = final_norms(target_dir, tokens)
    logits = reference_of(shape, target_dir).logits(features, tokens, entry.tokens[:-1])
    assert list(entry.tokens) == logits.argmax(-1).tolist()
    assert len(set(entry.tokens)) > 1
    expected = logits.log_softmax(-1)[range(7), list(entry.tokens)]
    torch.testing.assert_close(torch.tensor(entry.log_probs), expected, rtol=1e-4, atol=1e-4)


def test_every_node_of_a_tree_has_its_path_s_probability(
    shape: MtpShape, target_dir: Path, target: Target, tmp_path: Path
) -> None:
    drafter = load_drafter(
        save_mtp(tmp_path, target_dir, shape, mtp_tensors(shape)), target_dir, dtype=torch.float32
    )
    tokens = text(12, seed=5)
    _start(drafter, target, tokens)
    entry = _draft(drafter, 6, 60)
    features, reference = final_norms(target_dir, tokens), reference_of(shape, target_dir)
    words: list[tuple[int, ...]] = []
    for token, parent, log_prob in zip(entry.tokens, entry.parents, entry.log_probs, strict=True):
        before = words[parent] if parent >= 0 else ()
        logits = reference.logits(features, tokens, before)[-1]
        assert log_prob == pytest.approx(float(logits.log_softmax(-1)[token]), abs=1e-3)
        words.append((*before, token))
    assert max(map(len, words)) >= 4  # behind the last of three modules


@pytest.mark.parametrize("cuts", [(9, 10, 20), (1, 2, 3, 4, 20), (5, 19, 20)])
def test_text_in_pieces_equals_text_at_once(
    shape: MtpShape, target_dir: Path, target: Target, tmp_path: Path, cuts: tuple[int, ...]
) -> None:
    """Modules behind the first read rows of earlier passes."""
    directory = save_mtp(tmp_path, target_dir, shape, mtp_tensors(shape))
    tokens = text(21, seed=7)
    whole, pieces = (load_drafter(directory, target_dir, dtype=torch.float32) for _ in range(2))
    _start(whole, target, tokens)
    features = target.features(pieces, tokens)
    pieces.open(1, tokens[:2])
    known, fed = 2, 0
    for cut in cuts:
        pieces.extend(1, known, tokens[known : cut + 1])
        known = max(known, cut + 1)
        pieces.feed(1, fed, features[fed:cut])
        fed = cut
        pieces.draft([DraftRequest(1, 4)])
    first, second = _draft(whole, 6), _draft(pieces, 6)
    assert first.tokens == second.tokens
    assert first.log_probs == pytest.approx(second.log_probs, abs=1e-4)


def test_serving_equals_training(shape: MtpShape, target_dir: Path, target: Target, tmp_path: Path) -> None:
    directory = save_mtp(tmp_path, target_dir, shape, mtp_tensors(shape))
    drafter, tokens = load_drafter(directory, target_dir, dtype=torch.float32), text(20, seed=3)
    _start(drafter, target, tokens)
    entry = _draft(drafter, 7)
    embedding = embedding_of(target_dir)
    objective = DeepseekMtpObjective(
        shape,
        mtp_tensors(shape),
        embedding,
        embedding,
        TargetReference("", "tiny", (), 64),
        dtype=torch.float32,
    )
    whole = torch.tensor([[*tokens, *entry.tokens]])
    features = final_norms(target_dir, whole[0].tolist())[None]
    batch = Batch(
        tokens=whole,
        top_tokens=torch.zeros_like(whole),
        is_answer=torch.ones_like(whole, dtype=torch.bool),
        is_greedy=torch.ones(1, dtype=torch.bool),
        lengths=torch.tensor([whole.shape[1]]),
        taps=None,
        hidden=features,
    )
    with torch.no_grad():
        outs = [out[0, len(tokens) - 2] for out in objective.run(batch, features, 7)]
    log_probs = (torch.stack(outs) @ embedding.T).log_softmax(-1)
    assert log_probs.argmax(-1).tolist() == list(entry.tokens)
    torch.testing.assert_close(
        log_probs[range(7), list(entry.tokens)], torch.tensor(entry.log_probs), rtol=1e-4, atol=1e-4
    )


def test_it_reads_the_last_hidden_state_behind_or_before_the_final_norm(
    target_dir: Path, target: Target, tmp_path: Path
) -> None:
    tokens = text(12, seed=2)
    model = LlamaForCausalLM.from_pretrained(target_dir, dtype=torch.float32)
    with torch.inference_mode():
        streams: list[Tensor] = []
        model.model.norm.register_forward_pre_hook(lambda _, args: streams.append(args[0][0].clone()))
        normed = model.model(torch.tensor([tokens])).last_hidden_state[0]
    for reads_residual, expected in ((False, normed), (True, streams[0])):
        directory = save_mtp(
            tmp_path, target_dir, MTP_SHAPE, mtp_tensors(MTP_SHAPE), reads_residual=reads_residual
        )
        tap = drafter_tap(directory)
        assert tap is not None
        assert tap.width(MTP_SHAPE.hidden) == MTP_SHAPE.hidden
        drafter = load_drafter(directory, target_dir, dtype=torch.float32)
        torch.testing.assert_close(target.features(drafter, tokens), expected, rtol=1e-4, atol=1e-4)


def test_damaged_checkpoints_are_refused_by_name(target_dir: Path, tmp_path: Path) -> None:
    broken = {**mtp_tensors(MTP_SHAPE), "layers.1.enorm.weight": torch.ones(64)}
    del broken["layers.0.shared_head.norm.weight"]
    save_mtp(tmp_path, target_dir, MTP_SHAPE, broken)
    with pytest.raises(
        CheckpointError, match=r"shared_head\.norm\.weight is missing; layers\.1\.enorm\.weight is surplus"
    ):
        load_drafter(tmp_path, target_dir)
    for changes, words in (
        ({"num_modules": 0}, "num_modules"),
        ({"num_heads": 3}, "self_attn"),
        ({"target_vocab": VOCAB + 1}, "embedding"),
        ({"carries_norm": 1}, "carries_norm"),
        ({"reads_residual": True, "target_layers": None}, "target_layers"),
    ):
        save_mtp(tmp_path, target_dir, MTP_SHAPE, mtp_tensors(MTP_SHAPE), **changes)
        with pytest.raises(CheckpointError, match=words):
            load_drafter(tmp_path, target_dir)
