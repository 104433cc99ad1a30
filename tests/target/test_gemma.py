"""A second real family: Gemma 3 270M, with its norms, two rope bases and sliding windows, against transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.models import cached
from paceline.target import SequenceRows, TargetEngine

TEXT = "The lighthouse stood on the last rock before the open sea. Every evening the keeper climbed the stairs and "


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("executor", ["lean", "generic"])
def test_gemma_equals_transformers_beyond_its_window(executor: str) -> None:
    path = cached("gemma3-270m")
    if path is None:
        pytest.skip("run `paceline models fetch gemma3-270m` first")
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = tokenizer(TEXT * 30)["input_ids"][:600]  # the window is 512
    assert len(ids) == 600
    out = model.generate(
        torch.tensor([ids]),
        max_new_tokens=16,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    expected = out.sequences[0, len(ids) :].tolist()
    engine = TargetEngine.load(path, dtype=torch.float32, executor=executor)  # type: ignore[arg-type]
    slot = engine.open()
    for first in range(0, 500, 250):
        engine.step([SequenceRows(slot, ids[first : first + 250], num_logits="none")])
    step = engine.step([SequenceRows(slot, ids[500:], num_logits="last")])
    for token, logits in zip(expected, out.logits, strict=True):
        torch.testing.assert_close(step.logits[0][-1], logits[0], rtol=1e-3, atol=2e-3)
        assert int(step.logits[0][-1].argmax()) == token
        step = engine.step([SequenceRows.decode(slot, token)])
