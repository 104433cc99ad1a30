"""The teacher's batched forward equals transformers', token by token or at once, and survives rows leaving."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from paceline.contract.errors import TrainingDataError
from paceline.training.sizes import default_tap_layers
from paceline.training.teacher import Teacher, llama_sizes


def test_forward_equals_transformers(target_dir: Path) -> None:
    teacher = Teacher(target_dir, torch.float32)
    reference = LlamaForCausalLM.from_pretrained(target_dir, dtype=torch.float32)
    tokens = torch.randint(3, 200, (3, 60), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = reference(tokens, output_hidden_states=True)
        cache = teacher.new_cache(3, 64)
        parts = [teacher.forward(tokens[:, :20], cache)]
        parts += [teacher.forward(tokens[:, i : i + 1], cache) for i in range(20, 55)]
        parts.append(teacher.forward(tokens[:, 55:], cache))  # several tokens behind a filled cache
        hidden = torch.cat([h for h, _ in parts], dim=1)
        taps = torch.cat([t for _, t in parts], dim=1)
        logits = teacher.logits(hidden.flatten(0, 1)).view(3, 60, -1)
    torch.testing.assert_close(logits, expected.logits, atol=2e-4, rtol=1e-4)
    for i, layer in enumerate(teacher.tap_layers):
        torch.testing.assert_close(taps[:, :, i], expected.hidden_states[layer], atol=2e-4, rtol=1e-4)


def test_rows_may_leave(target_dir: Path) -> None:
    teacher = Teacher(target_dir, torch.float32)
    tokens = torch.randint(3, 200, (4, 12), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        cache = teacher.new_cache(4, 16)
        teacher.forward(tokens[:, :11], cache)
        whole, _ = teacher.forward(tokens[:, 11:], cache)
        cache = teacher.new_cache(4, 16)
        teacher.forward(tokens[:, :11], cache)
        cache.compact(torch.tensor([1, 3]))
        left, _ = teacher.forward(tokens[[1, 3], 11:], cache)
    torch.testing.assert_close(left, whole[[1, 3]], atol=1e-5, rtol=1e-5)


def test_cache_refuses_what_does_not_fit(target_dir: Path) -> None:
    teacher = Teacher(target_dir, torch.float32)
    with pytest.raises(TrainingDataError, match="positions"):
        teacher.new_cache(1, 257)
    with pytest.raises(TrainingDataError, match="do not fit"), torch.inference_mode():
        teacher.forward(torch.ones(1, 9, dtype=torch.int64), teacher.new_cache(1, 8))


def test_other_families_are_refused(gemma3_dir: Path) -> None:
    with pytest.raises(TrainingDataError, match="model_type 'gpt2'"):
        llama_sizes({"model_type": "gpt2"})
    with pytest.raises(TrainingDataError, match=r"'gemma3_text'.*`paceline data continue`"):
        Teacher(gemma3_dir, torch.float32)


@pytest.mark.parametrize(("num_layers", "layers"), [(32, (2, 16, 29)), (36, (2, 18, 33)), (30, (2, 15, 27))])
def test_tap_layers_are_the_public_ones(num_layers: int, layers: tuple[int, int, int]) -> None:
    assert default_tap_layers(num_layers) == layers
