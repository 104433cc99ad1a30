"""The independent drafter: its model's own greedy text, through rejections, batches and drafting ahead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from paceline.methods.checkpoint import CheckpointError
from paceline.methods.drafter import Drafter, DraftRequest, UnknownDraftSequenceError
from paceline.methods.loading import load_drafter
from tests.methods.conftest import VOCAB, text

Load = Callable[[Path], Drafter]


def _greedy(model_dir: Path, tokens: list[int], steps: int) -> list[int]:
    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    out = list(tokens)
    with torch.inference_mode():
        for _ in range(steps):
            out.append(int(model(torch.tensor([out])).logits[0, -1].argmax()))
    return out[len(tokens) :]


def _draft(drafter: Drafter, sequence_id: int, num_tokens: int) -> list[int]:
    (entry,) = drafter.draft([DraftRequest(sequence_id, num_tokens)])
    assert entry is not None
    return list(entry.tokens)


def test_chain_is_the_models_own_greedy_text(load: Load, independent_dir: Path) -> None:
    drafter = load(independent_dir)
    assert drafter.tap is None
    tokens = text(13, seed=1)
    drafter.open(1, tokens)
    assert _draft(drafter, 1, 6) == _greedy(independent_dir / "model", tokens, 6)


@pytest.mark.parametrize("num_accepted", [0, 2, 4])
def test_after_a_verification_equals_a_fresh_drafter(
    load: Load, independent_dir: Path, num_accepted: int
) -> None:
    tokens = text(9, seed=2)
    drafter = load(independent_dir)
    drafter.open(1, tokens)
    drafted = _draft(drafter, 1, 4)
    final = next(t for t in range(3, VOCAB) if t not in drafted)
    committed = [*drafted[:num_accepted], final]
    drafter.extend(1, len(tokens), committed)
    assert _draft(drafter, 1, 5) == _greedy(independent_dir / "model", [*tokens, *committed], 5)


def test_drafting_ahead_survives_a_commit_that_it_foretold(load: Load, independent_dir: Path) -> None:
    tokens = text(9, seed=3)
    drafter = load(independent_dir)
    drafter.open(1, tokens)
    ahead = _draft(drafter, 1, 8)
    drafter.extend(1, len(tokens), ahead[:3])
    assert _draft(drafter, 1, 5) == ahead[3:]


def test_batched_equals_single(load: Load, independent_dir: Path) -> None:
    texts = {1: text(4, 1), 2: text(20, 2)}
    drafter = load(independent_dir)
    for key, tokens in texts.items():
        drafter.open(key, tokens)
    entries = drafter.draft([DraftRequest(1, 5), DraftRequest(2, 3)])
    expected = [
        _greedy(independent_dir / "model", texts[1], 5),
        _greedy(independent_dir / "model", texts[2], 3),
    ]
    assert [list(entry.tokens) for entry in entries if entry is not None] == expected


def test_closed_sequences_are_unknown(load: Load, independent_dir: Path) -> None:
    drafter = load(independent_dir)
    drafter.open(1, text(4, 1))
    drafter.close(1)
    drafter.close(1)
    with pytest.raises(UnknownDraftSequenceError):
        drafter.draft([DraftRequest(1, 2)])


def test_unknown_methods_are_refused(target_dir: Path, independent_dir: Path, tmp_path: Path) -> None:
    config = (independent_dir / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"independent"', '"oracle"'))
    with pytest.raises(CheckpointError, match="oracle"):
        load_drafter(tmp_path, target_dir)


def test_slots_that_grew_are_used_again(load: Load, independent_dir: Path) -> None:
    drafter = load(independent_dir)
    tokens = text(150, seed=5)
    drafted = []
    for sequence_id in range(8):
        begun = (
            2 if sequence_id < 4 else 100
        )  # the first four grow to the capacity that the others begin with
        drafter.open(sequence_id, tokens[:begun])
        drafter.extend(sequence_id, begun, tokens[begun:])
        drafted.append(_draft(drafter, sequence_id, 4))
    assert drafted == drafted[:1] * 8
